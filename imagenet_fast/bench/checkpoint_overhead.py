"""A loop of `bench step` that saves its whole state as a run does, and what of that stands on the training thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from imagenet_fast.checkpoint import CheckpointWriter, Stamp
from imagenet_fast.checkpoint.serialization import Tree
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Checkpointing, Recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.state import TrainState


@dataclass
class Stood:
    """Seconds of each checkpoint for which the training thread stood still."""

    all_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    """Of them, for the checkpoint before, which was not written yet."""
    copied_s: list[float] = field(default_factory=list)
    """Of them, for the host copy. On a GPU it is only queued."""


class Saving:
    """Called after each step: every ``every_steps`` of them the state is saved under ``root``, beside training.

    Where steps are taken in blocks of so many, after ``warmup`` others, it is saved after the first of each block, so
    that the rest of the block is there to write it beside.
    """

    def __init__(
        self, recipe: Recipe, world: DistContext, state: TrainState, root: Path, every_steps: int, warmup: int
    ) -> None:
        policy = Checkpointing(every_steps=every_steps, every_minutes=0)
        recipe = recipe.model_copy(update={"checkpoint": policy})
        job = Job("bench step", recipe, split_batch(recipe, world.size), None, root)
        self._writer = _TimedWriter(root, world)
        self._keep = CheckpointManager(job, world, self._writer, recipe.global_batch, lambda: False)
        state.step = every_steps - 1 - warmup % every_steps
        self._keep(state, evaluated=True)  # the memory of the copy is asked for once in a run
        self.settle()
        self._writer.stood = Stood()

    def __call__(self, state: TrainState) -> None:
        before, begun = len(self.stood.copied_s), time.perf_counter()
        self._keep(state, evaluated=False)
        if len(self.stood.copied_s) > before:
            self.stood.all_s.append(time.perf_counter() - begun)

    @property
    def stood(self) -> Stood:
        return self._writer.stood

    def settle(self) -> None:
        """Wait until what was saved last is on the disk."""
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()


class _TimedWriter(CheckpointWriter):
    def __init__(self, root: Path, world: DistContext) -> None:
        super().__init__(root, world)
        self.stood = Stood()

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        begun = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        super().save(stamp, shared, own)
        self.stood.waited_s.append(waited - begun)
        self.stood.copied_s.append(time.perf_counter() - waited)
