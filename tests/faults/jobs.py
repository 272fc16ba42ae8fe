"""Real jobs that are killed, and go on by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil

from tests.e2e.command import COMMAND, environment, events_of, setting

SMALL = (
    "--recipe", "smoke", "--nproc", "3",
    *setting("reference_ranks=3", "global_batch=12", "epochs=2", "schedule.warmup_epochs=0", "data.train_images=120"),
    *setting("data.val_images=12", "log_every=1", "checkpoint.every_steps=4", "optim.lr=0.05"),
)  # fmt: skip
"""Twenty steps, with a checkpoint after every fourth and after each of two evaluations."""


FUSED = ("--set", "sync.threshold_mb=4")
"""Else each run cuts its messages as it has measured."""


@dataclass
class Running:
    """The command, at work."""

    command: subprocess.Popen[str]
    out: Path

    @property
    def ranks(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            children = psutil.Process(self.command.pid).children()
            return [child for child in children if "imagenet_fast.launch" in child.cmdline()]
        return []

    @property
    def step(self) -> int:
        with suppress(OSError, ValueError):
            return max((event["step"] for event in events_of(self.out, "train")), default=0)
        return 0

    @property
    def printed(self) -> str:
        """What it has printed, without a traceback."""
        text = (self.out.parent / f"{self.out.name}.log").read_text()
        assert "Traceback" not in text, text[-3000:]
        return text

    def ended(self, within_s: float) -> int:
        try:
            return self.command.wait(within_s)
        finally:
            self.kill_at_once()

    def kill_at_once(self) -> None:
        """The command, and whatever it has started."""
        with suppress(OSError):
            os.killpg(self.command.pid, signal.SIGKILL)


def start(out: Path, *arguments: str, job: Sequence[str] = (*SMALL, "--resume", "auto")) -> Running:
    """The small run, or what is left of it; what it prints goes to a file beside ``out``."""
    return start_logged(out, out.parent / f"{out.name}.log", "--out", str(out), *job, *arguments)


def start_logged(out: Path, log: Path, *arguments: str) -> Running:
    """Start the command in a session of its own; what it prints is added to ``log``."""
    with log.open("a") as file:
        process = subprocess.Popen(
            [*COMMAND, "train", *arguments],
            stdout=file, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True,
        )  # fmt: skip
    return Running(process, out)


def train(out: Path, *arguments: str, job: Sequence[str] = SMALL) -> str:
    """To the end; the final weights' digest."""
    running = start(out, *arguments, job=(*job, "--resume", "auto"))
    assert running.ended(240) == 0, running.printed[-2000:]
    return digest(out)


def digest(out: Path) -> str:
    return sha256((out / "checkpoints" / "final.safetensors").read_bytes()).hexdigest()[:16]
