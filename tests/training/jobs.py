"""A job trained on ranks that are here already, and what its record was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imagenet_fast.distributed.init import DistContext
from imagenet_fast.metrics import Event, MetricLogger, RunResult, Sink
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.models.weights import Weights, write_weights
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.trainer import Trainer


class Told:
    """A sink that keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    @property
    def losses(self) -> list[float]:
        return [event.values["loss"] for event in self.events if event.name == "train"]


def run_job(job: Job, world: DistContext, **settings: Any) -> RunResult:
    """As :meth:`Trainer.run`, and close its engine, as ranks that live on must."""
    trainer = Trainer(job, world, **settings)
    try:
        return trainer.run()
    finally:
        trainer.state.sync.close()


def train_job(job: Job, world: DistContext, weights: Weights | None = None, sinks: Sequence[Sink] = ()) -> RunResult:
    """To its end, without checkpoints; leaves the final weights in its folder."""
    trainer = Trainer(job, world)
    trainer.open_data()
    trainer.weights = weights
    trainer.metrics = MetricLogger(trainer.clock.run_s, sinks)
    trainer.build()
    trainer.train()
    trainer.state.settle()
    if world.is_main:
        write_weights(trainer.state.whole().state_dict(), job.folder / FINAL_WEIGHTS, {})
    trainer.state.sync.close()
    return trainer.outcome
