"""Help and completion; what becomes of errors that no command has put into words."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imagenet_fast.cli.main import app, main
from tests.e2e.command import in_process


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


ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("subprocesses")
def test_help_needs_neither_torch_nor_pydantic():
    command = [sys.executable, "-X", "importtime", "-m", "imagenet_fast", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()}
    assert "imagenet_fast.cli.main" in modules
    assert not modules & {"torch", "pydantic", "numpy", "rich.live"}
    for command in ("train", "eval", "export", "recipes", "plan", "report", "bench", "data", "launch"):
        assert command in imported.stdout


@pytest.mark.parametrize(("words", "completed"), [("be", "bench"), ("bench st", "step"), ("train --rec", "--recipe")])
def test_completion_names_commands_and_options(words: str, completed: str):
    asked = {"_IMAGENET_FAST_COMPLETE": "complete_bash", "COMP_WORDS": f"imagenet-fast {words}"}
    runner = CliRunner(env=asked | {"COMP_CWORD": str(len(words.split()))})
    assert runner.invoke(app, prog_name="imagenet-fast").output.split() == [completed]


def test_a_recipe_is_shown_as_its_file_is():
    assert in_process("recipes", "show", "demo") == (ROOT / "recipes" / "demo.toml").read_text()
