"""Help and completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from tests.e2e.command import in_process

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
