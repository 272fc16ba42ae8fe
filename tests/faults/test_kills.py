"""Ranks that are killed at chosen moments, under one engine after another: the same run goes on to the same bits."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from imagenet_fast.run.result import read_outcome
from imagenet_fast.training.trainer import Trainer
from tests.e2e.command import train_here
from tests.faults.jobs import digest
from tests.ranks import run
from tests.training.jobs import job_of

pytestmark = pytest.mark.ci

ENGINES: dict[str, dict[str, Any]] = {
    "hybrid": {"kind": "hybrid"},
    "lazy int8": {"kind": "lazy", "wire": "int8"},
    "sparse": {"kind": "sparse", "dense_epochs": 0.2, "ramp_epochs": 0.2},
}
MOMENTS: dict[str, str | int] = {
    "in a step before the first checkpoint": 2,
    "in a step after it": 8,
    "as a checkpoint begins": "os.mkdir .*step-00000006",
    "as rank 1 writes its part": "open .*/.step-00000006/.rank-00001",
    "before the checkpoint is complete": "os.rename .*/.step-00000006/manifest.json",
    "before the checkpoint has its name": "os.rename .*/.step-00000006',",
    "before an old checkpoint is removed": "os.rename .*/step-00000003', '",
    "as an old checkpoint is removed": "(os.remove|shutil.rmtree) .*/.step-00000003",
    "as the final weights are written": "os.rename .*final.safetensors",
    "as the outcome is written": "os.rename .*outcome.json",
}
"""After how many steps, or at which audit event of Python's the rank that has it ends; the others lose it."""


@cache
def alone(engine: str) -> str:
    """The digest of the run that nobody disturbs."""
    with TemporaryDirectory() as folder:
        run(2, _train, Path(folder), engine, fresh=True)
        return digest(Path(folder))


@pytest.mark.parametrize(("moment", "engine"), list(zip(MOMENTS, cycle(ENGINES))))
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(moment: str, engine: str, tmp_path: Path):
    with pytest.raises(AssertionError, match="ended with exit code -9"):
        run(2, _train, tmp_path, engine, MOMENTS[moment], fresh=True)
    run(2, _train, tmp_path, engine, fresh=True)
    outcome = read_outcome(tmp_path)
    assert (outcome.status, outcome.steps) == ("finished", 10)
    assert outcome.resumed == (0 if "before the first" in moment else 1)
    assert digest(tmp_path) == alone(engine)


def _train(folder: Path, engine: str, moment: str | int = 0) -> None:
    small = {"data__train_images": 80, "data__val_images": 6, "checkpoint": {"every_steps": 3}}
    job = job_of(folder, resume=True, sync={"wire": "fp32"} | ENGINES[engine], **small)
    untouched, steps = Trainer.train_step, iter(range(moment if isinstance(moment, int) and moment else sys.maxsize))

    def take_step(trainer: Trainer) -> None:
        if next(steps, None) is None:
            _die()
        untouched(trainer)

    if isinstance(moment, str):
        sys.addaudithook(partial(_hear, moment))
    with patch.object(Trainer, "train_step", take_step):
        train_here(job)


def _hear(moment: str, event: str, arguments: tuple[object, ...]) -> None:
    if re.match(moment, f"{event} {arguments}"):
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
