"""Help, completion and the list of recipes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import environment, imagenet_fast

ROOT = Path(__file__).parents[2]


def test_help_needs_neither_torch_nor_pydantic():
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "imagenet_fast", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()}
    assert "imagenet_fast.cli.main" in modules
    assert not modules & {"torch", "pydantic", "numpy", "rich.live"}
    for command in ("train", "eval", "export", "recipes", "report", "bench", "data", "launch"):
        assert command in imported.stdout


def test_completion_names_commands_and_options():
    def completed(*words: str) -> list[str]:
        asked = {"_IMAGENET_FAST_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("imagenet-fast", *words))}
        command = Path(sys.executable).with_name("imagenet-fast")  # a shell completes it by this name
        return subprocess.run(
            [command], capture_output=True, text=True, check=True, env=environment(**asked, COMP_CWORD=str(len(words)))
        ).stdout.split()

    assert completed("be") == ["bench"]
    assert completed("bench", "st") == ["step"]
    assert completed("train", "--rec") == ["--recipe"]


def test_recipes_are_listed_and_shown():
    table = imagenet_fast("recipes", COLUMNS="80").stdout
    assert re.search(r"alexnet-512gpu +alexnet_bn +lars +lazy +dp +512 +65536 +95 +58.7 %", table)
    assert re.search(r"alexnet-4host +alexnet_bn +sgd +hybrid +tp4 +4 +512 +100 +60.1 %", table)
    assert imagenet_fast("recipes", "show", "demo").stdout == (ROOT / "recipes" / "demo.toml").read_text()
