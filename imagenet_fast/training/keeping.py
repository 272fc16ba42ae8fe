"""When a training's state is saved, and when it is to stop: the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from imagenet_fast.checkpoint import CheckpointWriter, Stamp
from imagenet_fast.ranks.vote import Vote
from imagenet_fast.ranks.whereabouts import here
from imagenet_fast.ranks.world import World
from imagenet_fast.recipe.changes import digest
from imagenet_fast.recipe.job import Job, recipe_tables
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.streak import NotFinite


class Keeper:
    """Called after each step: it saves when the recipe says so, after evaluations, and before a stop; but nothing whose
    numbers have gone wrong, unless the recipe's ``nonfinite_steps`` is 0.

    ``asked`` tells whether this rank has been asked to stop; ``images`` are those of an epoch. Without a ``writer``
    nothing is saved.
    """

    def __init__(
        self, job: Job, world: World, writer: CheckpointWriter | None, images: int, asked: Callable[[], bool]
    ) -> None:
        self._job = job
        self._world = world
        self._writer = writer
        self._images = images
        self._asked = asked
        self._vote = Vote(world, wishes=2)
        self._saved_at = time.monotonic()
        self._told = False  # the others, that the last one was written too long ago

    def __call__(self, state: TrainState, evaluated: bool) -> bool:
        """Whether all ranks are to stop; what there is has been saved then. Raises NotFinite where it must not be."""
        policy = self._job.recipe.checkpoint
        is_late = self._is_late()
        stop, late = self._vote(self._asked(), is_late)
        self._told |= is_late and self._vote.cast
        due = policy.every_steps > 0 and state.step % policy.every_steps == 0
        if self._writer is not None and (stop or late or due or evaluated):
            self._saved_at, self._told = time.monotonic(), False
            if self.is_sound(state):
                self._save(self._writer, state, evaluated)
            elif stop:
                raise NotFinite
            if stop:
                here.enter("checkpoint")
                self._writer.wait()
        return stop

    def is_sound(self, state: TrainState) -> bool:
        """Whether ``state``, which is settled, may take the place of what was saved before. Every rank must ask."""
        here.enter("checkpoint")
        state.settle()
        return self._job.recipe.nonfinite_steps == 0 or state.is_sound()

    def set_aside(self, step: int) -> int | None:
        """What was saved after ``step`` or later, if anything was before, is not gone on from. Returns the step of what
        is, on rank 0; None where nothing was saved. Nothing will be any more, on any rank."""
        here.enter("checkpoint")
        return None if self._writer is None else self._writer.set_aside(step)

    @property
    def saves(self) -> bool:
        """Whether what there is when all ranks stop has been saved."""
        return self._writer is not None

    def close(self) -> None:
        """There will be no further step, on any rank."""
        self._vote.close()

    def _is_late(self) -> bool:
        """By rank 0's clock; while one is being written there is no hurry."""
        minutes = self._job.recipe.checkpoint.every_minutes
        if not minutes or not self._world.leads or self._writer is None or self._writer.under_way or self._told:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def _save(self, writer: CheckpointWriter, state: TrainState, evaluated: bool) -> None:
        recipe, outcome = self._job.recipe, state.outcome
        stamp = Stamp(
            step=state.step,
            epoch=outcome.epochs,
            world=self._world.size,
            layout=recipe.parallel.axes(self._world.size),
            recipe=digest(recipe),
            top1=outcome.top1 if evaluated else None,
        )
        own = state.own()
        about = {"recipe": recipe_tables(recipe), "images": self._images, "saved_at": time.time()}
        writer.save(stamp, about | state.shared(), own)
