"""What several commands refuse alike, before anything is started for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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
