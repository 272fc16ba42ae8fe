"""The CLI as a user starts it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import tests
from imagenet_fast.cli.main import app, entry
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.result import RunResult
from imagenet_fast.training.trainer import Trainer
from tests.guard import STARTED

COMMAND = [sys.executable, "-m", "imagenet_fast"]


def setting(*changes: str) -> tuple[str, ...]:
    """The options that make these changes of a recipe."""
    return tuple(word for change in changes for word in ("--set", change))


SMOKE = (
    "train", "--recipe", "smoke", "--seed", "5", "--fresh-head",
    *setting("precision.kind=fp32", "global_batch=8", "micro_batch=2", "data.train_images=64", "data.val_images=15"),
    *setting("checkpoint.every_steps=6", "checkpoint.keep=9"),
)  # fmt: skip
"""A quarter of the images of `smoke` as it is shipped, and all of its sixteen steps."""


def environment(**more: str) -> dict[str, str]:
    """As a terminal has it, nothing of the test's own ranks; with one thread a process, as a test's neighbours have."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"OMP_NUM_THREADS": "1"} | more


def imagenet_fast(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=240, env=environment(**more)
    )


def become_command(files: Sequence[Path], arguments: Sequence[str], more: dict[str, str]) -> None:
    """Be the command line from now on, in a process that was forked from one that ignores signals; what it prints and
    complains of goes to two ``files``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ |= environment(**more)
    sys.argv = ["imagenet-fast", *arguments]
    entry()


class Forked:
    """The command line in a process of its own, which has imported torch already."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        self._files = folder / "printed", folder / "said"
        self._process = multiprocessing.get_context("forkserver").Process(
            target=become_command, args=(self._files, arguments, more)
        )
        sys.audit(STARTED, *arguments)
        self._process.start()
        self._kill = weakref.finalize(self, self._process.kill)

    def ended(self, *numbers: signal.Signals) -> tuple[int | None, str, str]:
        """Its exit code, what it has printed and what it has complained of, once it has ended by these signals."""
        for number in numbers:
            os.kill(self._process.pid or 0, number)
        self._process.join(240)
        self._kill()
        self._process.join()
        return self._process.exitcode, *(file.read_text() for file in self._files)


def in_process(*arguments: str) -> str:
    """Return the CLI's output, run in this process, which has imported torch already; it must exit with 0, and warn of
    nothing."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output == done.stdout
    return done.stdout


def train_here(job: Job, ask_first: Callable[[], Callable[[], bool]] | None = None) -> RunResult:
    """As one of the ranks that are here already; of several, they are fresh ones: groups stay open."""
    return Trainer(job, tests.world(), ask_first=ask_first).run()


def outcome_of(run: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((run / "outcome.json").read_text())
    return outcome


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == name]


def wait_for(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
