"""A job trained on ranks that are here already, and what its record was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tests
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.metrics import Event, RunResult
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables

SMALL_NETWORK = {"kind": "cifarnet", "widths": [4, 5, 6]}


def job_of(folder: Path = Path("unused"), images: Path | None = None, resume: bool = False, **changes: Any) -> Job:
    """For the ranks that are here; with a small network unless ``changes`` of the recipe name another."""
    recipe = parse_recipe("test", tables(**({"model": SMALL_NETWORK} | changes)))
    return Job("test", recipe, split_batch(recipe, tests.world().size), images, folder, resume=resume)


class Told:
    """A sink that keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events if event["event"] == "train"]


def run_job(job: Job, world: DistContext, **settings: Any) -> RunResult:
    """As :meth:`Trainer.run`, and close its engine, as ranks that live on must."""
    trainer = Trainer(job, world, **settings)
    try:
        return trainer.run()
    finally:
        trainer.state.sync.close()
