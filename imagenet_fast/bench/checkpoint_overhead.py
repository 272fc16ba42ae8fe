"""Measure how long checkpoints block the training thread.

A loop of `bench step` saves its whole state as a run does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from imagenet_fast.checkpoint import CheckpointWriter, Stamp
from imagenet_fast.checkpoint.tree import Tree
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Checkpointing, Recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.state import TrainState


@dataclass
class CheckpointStalls:
    """Seconds for which each checkpoint blocked the training thread."""

    all_s: list[float] = field(default_factory=list)
    """Total time of each checkpoint."""
    waited_s: list[float] = field(default_factory=list)
    """Part of ``all_s`` spent waiting until the previous checkpoint was written."""
    copied_s: list[float] = field(default_factory=list)
    """Part of ``all_s`` spent on the copy to host memory, which on a GPU is only queued."""


class Saving:
    """A callback that saves the training state every ``every_steps`` steps while training continues.

    With ``warmup`` steps first and then blocks of ``every_steps`` steps, it saves after the first step of each block.
    The rest of the block then overlaps with the writing.
    """

    def __init__(
        self, recipe: Recipe, world: DistContext, state: TrainState, root: Path, every_steps: int, warmup: int
    ) -> None:
        """Save one checkpoint that is not counted, so that host memory for the copy is allocated.

        Args:
            recipe: The recipe to train, with any checkpoint settings; these are replaced.
            world: The ranks.
            state: The training state; its step is set so that the saves fall as the class describes.
            root: Directory of the checkpoints.
            every_steps: Steps from one checkpoint to the next.
            warmup: Steps before the first block.
        """
        policy = Checkpointing(every_steps=every_steps, every_minutes=0)
        recipe = recipe.model_copy(update={"checkpoint": policy})
        job = Job("bench step", recipe, split_batch(recipe, world.size), None, root)
        self._writer = _TimedWriter(root, world)
        self._keep = CheckpointManager(job, world, self._writer, {}, lambda: False)
        state.step = every_steps - 1 - warmup % every_steps
        self._keep.save(state, evaluated=True)  # a run allocates the copy's memory only once
        self.settle()
        self._writer.stood = CheckpointStalls()

    def __call__(self, state: TrainState) -> None:
        """Save ``state`` if a checkpoint is due, and record how long that blocked the caller."""
        before, begun = len(self.stood.copied_s), time.perf_counter()
        self._keep.after_step(state)
        if len(self.stood.copied_s) > before:
            self.stood.all_s.append(time.perf_counter() - begun)

    @property
    def stood(self) -> CheckpointStalls:
        """Times of the checkpoints so far."""
        return self._writer.stood

    def settle(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._writer.wait()

    def close(self) -> None:
        """Close the checkpoint writer."""
        self._writer.close()


class _TimedWriter(CheckpointWriter):
    """A checkpoint writer that times its waits and copies."""

    def __init__(self, root: Path, world: DistContext) -> None:
        super().__init__(root, world)
        self.stood = CheckpointStalls()

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        begun = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        super().save(stamp, shared, own)
        self.stood.waited_s.append(waited - begun)
        self.stood.copied_s.append(time.perf_counter() - waited)
