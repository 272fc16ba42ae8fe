"""Save checkpoints beside a loop of `bench step`, as a run does, and measure how long they stall its thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from imagenet_fast.checkpoint import CheckpointWriter, Stamp
from imagenet_fast.checkpoint.tree import Tree
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.state import TrainState


@dataclass(frozen=True)
class Stall:
    """Seconds for which a checkpoint stalled the training thread."""

    all_s: float
    """Total time."""
    copied_s: float
    """Part of it spent on the copy to host memory, which on a GPU is only queued."""


class Saving:
    """Checkpoints of a training state; a call saves one, which is written while training continues."""

    def __init__(self, recipe: Recipe, world: DistContext, state: TrainState, root: Path) -> None:
        """Save into the directory ``root``."""
        job = Job("bench step", recipe, split_batch(recipe, world.size), None, root)
        self.stalls: list[Stall] = []
        """Stalls of the checkpoints so far; the first may allocate memory for the copy."""
        self._state = state
        self._writer = _TimedWriter(root, world)
        self._manager = CheckpointManager(job, world, self._writer, {}, lambda: False)

    def __call__(self) -> None:
        """Save the state, and record how long that stalled the caller."""
        begun = time.perf_counter()
        self._manager.save(self._state, evaluated=False)
        self.stalls.append(Stall(time.perf_counter() - begun, self._writer.copied_s))

    def settle(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._writer.wait()

    def close(self) -> None:
        """Close the checkpoint writer."""
        self._writer.close()


class _TimedWriter(CheckpointWriter):
    """A checkpoint writer that times its last copy."""

    copied_s = 0.0

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        begun = time.perf_counter()
        super().save(stamp, shared, own)
        self.copied_s = time.perf_counter() - begun
