"""What several commands refuse alike, and what becomes of errors that none has put into words."""

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


@pytest.mark.parametrize(
    "command",
    [("train", "--recipe", "demo"), ("compare", "--recipe", "smoke"), ("launch", "slurm", "--recipe", "demo")],
)
def test_an_empty_run_directory_is_refused(refusal: Callable[..., str], command: tuple[str, ...]):
    nodes = ("--nodes", "2") if command[0] == "launch" else ()
    assert "--out is empty; name a directory" in refusal(*command, *nodes, "--out", "")


@pytest.mark.parametrize(
    "command",
    [("plan", "--rows", "--json"), ("bench", "step", "--json"), ("bench", "profile"), ("report", "x", "--png")],
)
def test_a_directory_is_no_file_to_write(refusal: Callable[..., str], command: tuple[str, ...], tmp_path: Path):
    assert f"{tmp_path} is a directory; name a file" in refusal(*command, str(tmp_path))
