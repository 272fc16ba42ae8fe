"""Each page is followed from its first command to its last, as a reader does it, in an empty directory.

What is printed is what the page shows, but for the figures. `tests/pages.py` tells which commands run.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.recipe.load import load_recipe, to_toml
from tests.data.prepare.replica import official_tars, small_imagenet
from tests.e2e.command import COMMAND, environment
from tests.pages import PAGES, ROOT, Command, blocks, name_of, shown_commands
from tests.ranks import run


def run_here(page: Path) -> list[Command]:
    return [command for command in shown_commands(page) if command.how != "not here"]


def tier(page: Path) -> pytest.MarkDecorator:
    return pytest.mark.weekly if any(command.how == "weekly" for command in run_here(page)) else pytest.mark.ci


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, beside the downloads; absolute paths of the pages are below it."""
    official_tars(tmp_path / "downloads", small_imagenet(train=16, val=5))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=tier(page), id=name_of(page)) for page in PAGES if run_here(page)]
)
def test_a_page_prints_what_it_shows(page: Path, reader: Path):
    for command in run_here(page):
        if command.words[:2] == ["data", "verify"] and not (reader / "data" / "imagenet").exists():
            source = ("--source", str(reader / "downloads"), "--out", str(reader / "data" / "imagenet"))
            in_process(["data", "prepare", *source, "--subset"])
        words = [
            re.sub(r"^/(downloads|data|nvme)\b", rf"{reader}/\1", word) for word in (*command.words, *command.options)
        ]
        printed = in_process(words) if command.how == "here" else by_ranks(words, stop="^C" in command.prints)
        if redirected := re.search(r" > (\S+)$", command.text):
            Path(redirected[1]).write_text(printed)
        compare_with_page(command, printed)


def in_process(words: list[str]) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def by_ranks(words: list[str], *, stop: bool) -> str:
    """What a command prints that starts ranks; it is interrupted after the first epoch, as a terminal does it."""
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(COLUMNS="80", PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    printed = ""
    for line in process.stdout:
        if stop and line.startswith("epoch") and "epoch" not in printed:
            os.killpg(process.pid, signal.SIGINT)
        printed += line
    assert process.wait(timeout=120) == (4 if stop else 0), printed
    return printed


def compare_with_page(command: Command, printed: str) -> None:
    """Assert that each line that the page shows was printed, in this order, whatever its figures are."""
    lines = [without_figures(line) for line in printed.splitlines()]
    for line in map(without_figures, command.prints.splitlines()):
        if line not in ("...", "^C", ""):
            assert line in lines, f"{command.place}: {line}\nis not in\n{printed}"
            lines = lines[lines.index(line) :]  # lines that differ in figures alone may be one here


def without_figures(line: str) -> str:
    """The line with 0 for each number, single spaces, and no directories before runs/ and data/."""
    line = re.sub(r"\S*/(?=(runs|data)/)", "", line)
    return " ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line).split())


PYTHON = {
    name_of(page): texts
    for page in PAGES
    if (texts := [block.text for block in blocks(page) if block.language == "python"])
}


@pytest.mark.ci
@pytest.mark.parametrize("page", PYTHON)
def test_python_of_a_page_runs(page: str, tmp_path: Path):
    recipe = tmp_path / "tiny.toml"
    changes = ("global_batch=8", "micro_batch=4", "data.train_images=16", "data.val_images=8")
    recipe.write_text(to_toml(load_recipe("smoke", overrides=changes)))
    texts = [text.replace('"demo"', repr(str(recipe))) for text in PYTHON[page]]
    run(2, run_blocks, page, texts, tmp_path, fresh=True)


def run_blocks(page: str, texts: list[str], folder: Path) -> None:
    """Run the blocks of a page one after the other; what a reader has before the first is a model and batches."""
    os.chdir(folder)
    names: dict[str, Any] = {"torch": torch, "criterion": nn.functional.cross_entropy}
    names["batches"] = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
    for number, text in enumerate(texts):
        if re.search(r"GradientPool\(model|attach\(model", text):
            torch.manual_seed(0)
            names["model"] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        with redirect_stdout(io.StringIO()):
            exec(compile(text, f"{page}, block {number + 1}", "exec"), names)
