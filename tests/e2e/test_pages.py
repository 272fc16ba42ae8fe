"""Each page is followed from its first command to its last, as a reader does it, in an empty directory.

What is printed is what the page shows, but for the figures. `tests/pages.py` tells which commands run.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.recipe.load import find_recipe, load_recipe, to_toml
from tests.data.prepare.replica import official_tars, small_imagenet
from tests.e2e.command import COMMAND, environment
from tests.pages import PAGES, ROOT, Command, name_of, python_blocks, shown_commands
from tests.ranks import run


def run_here(page: Path) -> list[Command]:
    return [command for command in shown_commands(page) if command.how != "not here"]


def needs_ranks(page: Path) -> bool:
    return any(command.how == "weekly" for command in run_here(page))


QUICK = [page for page in PAGES if run_here(page) and not needs_ranks(page)]
WITH_RANKS = [page for page in PAGES if needs_ranks(page)]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, beside the downloads; absolute paths of the pages are below it."""
    official_tars(tmp_path / "downloads", small_imagenet(train=16, val=5))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def words_of(command: Command, reader: Path) -> list[str]:
    words = (*command.words, *command.options)
    return [re.sub(r"^/(downloads|data|nvme)\b", rf"{reader}/\1", word) for word in words]


def in_process(words: list[str]) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.ci
@pytest.mark.parametrize("page", QUICK, ids=name_of)
def test_a_page_without_ranks_prints_what_it_shows(page: Path, reader: Path):
    for command in run_here(page):
        if command.words[:2] in (["data", "verify"], ["data", "cache"]) and not (reader / "data" / "imagenet").exists():
            source = ("--source", str(reader / "downloads"), "--out", str(reader / "data" / "imagenet"))
            in_process(["data", "prepare", *source, "--subset"])
        compare_with_page(command, in_process(words_of(command, reader)))


@pytest.mark.weekly
@pytest.mark.parametrize("page", WITH_RANKS, ids=name_of)
def test_a_page_with_ranks_prints_what_it_shows(page: Path, reader: Path):
    for command in run_here(page):
        stop = "^C" in command.prints
        process = subprocess.Popen(
            [*COMMAND, *words_of(command, reader)], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=environment(COLUMNS="80", PYTHONPATH=str(ROOT), IMAGENET_FAST_CACHE=str(reader / "cache")),
        )  # fmt: skip
        assert process.stdout is not None
        printed = "".join(interrupted(process, process.stdout) if stop else process.stdout)
        assert process.wait(timeout=120) == (4 if stop else 0), f"{command.place}: {printed}"
        if redirected := re.search(r" > (\S+)$", command.text):
            Path(redirected[1]).write_text(printed)
        compare_with_page(command, printed)


def interrupted(process: subprocess.Popen[str], lines: Iterator[str]) -> Iterator[str]:
    """What a process prints that is interrupted after the first epoch, as a terminal does it."""
    for line in lines:
        yield line
        if line.startswith("epoch"):
            os.killpg(process.pid, signal.SIGINT)
            break
    yield from lines


def compare_with_page(command: Command, printed: str) -> None:
    """Assert that each line that the page shows was printed, in this order, whatever its figures are."""
    lines = map(without_figures, printed.splitlines())
    for line in command.prints.splitlines():
        if line.strip() not in ("...", "^C", ""):
            assert without_figures(line) in lines, f"{command.place}: {line}\nis not in\n{printed}"


def without_figures(line: str) -> str:
    """The line with 0 for each number, single spaces, and no directories before runs/ and data/."""
    line = re.sub(r"\S*/(?=(runs|data)/)", "", line)
    return " ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line).split())


@pytest.mark.ci
def test_python_of_the_pages_runs(tmp_path: Path):
    recipe = tmp_path / "tiny.toml"
    changes = ("global_batch=8", "micro_batch=4", "data.train_images=16", "data.val_images=8")
    recipe.write_text(to_toml(load_recipe(find_recipe("smoke"), overrides=changes)))
    programs = {
        name_of(page): [block.text.replace('"demo"', repr(str(recipe))) for block in python_blocks(page)]
        for page in PAGES
    }
    assert sum(map(len, programs.values())) >= 7
    run(2, run_programs, programs, tmp_path, fresh=True)


def run_programs(programs: dict[str, list[str]], folder: Path) -> None:
    """Run the blocks of each page one after the other; what a reader has before the first is a model and batches."""
    os.chdir(folder)
    for page, blocks in programs.items():
        names: dict[str, Any] = {"torch": torch, "criterion": nn.functional.cross_entropy}
        names["batches"] = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
        for number, block in enumerate(blocks):
            if re.search(r"GradientPool\(model\)|attach\(model", block):
                torch.manual_seed(0)
                names["model"] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
            with redirect_stdout(io.StringIO()):
                exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
