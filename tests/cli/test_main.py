"""What becomes of errors that no command has put into words."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imagenet_fast.cli.main import main


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG, errno.EROFS]
)
def test_an_error_of_a_path_is_a_sentence(number: int, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr("imagenet_fast.metrics.report.read_run", fail)
    assert refusal("report", "my/run") == f"error: [Errno {number}] {os.strerror(number)}: 'my/run'; check the path\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "my/run"),
        OSError(errno.ENOSPC, "No space left on device", "my/run"),
        OSError(errno.EIO, "Input/output error", "my/run"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # of a process or a socket
    ],
    ids=lambda error: errno.errorcode[error.errno],
)
def test_no_other_error_blames_a_path(error: OSError, monkeypatch: pytest.MonkeyPatch):
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr("imagenet_fast.metrics.report.read_run", fail)
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", "report", "my/run"])
    with pytest.raises(type(error), match=str(error.strerror)):
        main()
