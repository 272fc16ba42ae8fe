"""When a training's state is saved, and when it is to stop: the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from imagenet_fast.checkpoint import CheckpointWriter, NotSaved, Stamp
from imagenet_fast.data.fingerprint import Contents
from imagenet_fast.distributed.async_any import AsyncAnyReduce
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import JobAborted, warn
from imagenet_fast.recipe.job import Job, recipe_tables
from imagenet_fast.recipe.resume_compat import digest
from imagenet_fast.training.nonfinite_count import NonFiniteLoss
from imagenet_fast.training.state import TrainState

_LOOK_S = 1.0  # between two looks whether another rank was asked to stop
_STOP = "stop"
_AGAIN_S, _AGAIN_LATER_S = 60.0, 600.0  # from a checkpoint that failed to the next try: at first, and at most


class CheckpointManager:
    """Called after each step: it saves when the recipe says so, after evaluations, and before a stop; but nothing whose
    numbers have gone wrong, unless the recipe's ``nonfinite_steps`` is 0. What cannot be saved does not end the
    training: rank 0 warns, and all try again.

    ``asked`` tells whether this rank has been asked to stop; ``images`` are those of an epoch. Without a ``writer``
    nothing is saved. By ``store``, of which this is the only client, a rank tells the others between steps.
    """

    def __init__(
        self, job: Job, world: DistContext, writer: CheckpointWriter | None, images: int, asked: Callable[[], bool],
        store: Store | None = None,
    ) -> None:  # fmt: skip
        self._job = job
        self._world = world
        self._writer = writer
        self._images = images
        self._contents: Contents | None = None
        self._asked = asked
        self._vote = AsyncAnyReduce(world, wishes=2)
        self._saved_at = time.monotonic()
        self._told = False  # the others, that the last one was written too long ago
        self._store = None if store is None else PrefixStore("keeper", store)
        self._looked_at = 0.0
        self._told_to_stop = False
        self._is_saving = False
        self._unsaved: NotSaved | None = None
        self._heard_of: Exception | None = None
        self._again_at = 0.0
        self._pause_s = _AGAIN_S

    def asked(self) -> bool:
        """Whether this rank has been asked to stop or, as it heard within the last second, another one. Between steps,
        where ranks do not vote."""
        if self._asked():
            if self._store is not None and not self._told_to_stop:
                self._told_to_stop = True
                self._store.set(_STOP, "")
            return True
        now = time.monotonic()
        if self._store is None or self._world.size == 1 or now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        return self._store.check([_STOP])

    def __call__(self, state: TrainState, evaluated: bool | None) -> bool:
        """Whether all ranks are to stop; what there is has been saved then. They do where an evaluation was cut off,
        so that ``evaluated`` is None. Raises NotFinite where it must not be saved, Fault where it cannot be."""
        policy = self._job.recipe.checkpoint
        is_late = self._is_late()
        stop, late = self._vote(self._asked(), is_late)
        stop |= evaluated is None
        self._told |= is_late and self._vote.cast
        due = policy.every_steps > 0 and state.step % policy.every_steps == 0
        if self._writer is not None and (stop or late or due or evaluated):
            self._saved_at, self._told = time.monotonic(), False
            if self.is_sound(state):
                self._save(self._writer, state, bool(evaluated))
            elif stop:
                raise NonFiniteLoss
            if stop and (unsaved := self.finish(state, bool(evaluated))):
                raise JobAborted(unsaved)
        return stop

    def finish(self, state: TrainState, evaluated: bool) -> str:
        """There is no further step: wait for what is being saved, or try once more. Why it could not be, on every rank;
        nothing where it is."""
        if self._writer is None:
            return ""
        here.enter("checkpoint")
        self._await(self._writer)
        if self._unsaved is not None:
            self._save(self._writer, state, evaluated)
            self._await(self._writer)
        return "" if self._unsaved is None else str(self._unsaved)

    def _await(self, writer: CheckpointWriter) -> None:
        """The last checkpoint, if one is being written."""
        if not self._is_saving:
            return
        self._is_saving = False
        try:
            writer.wait()
        except NotSaved as error:
            self._unsaved = error
            self._hear(error)
        else:
            self._unsaved, self._pause_s = None, _AGAIN_S

    def _hear(self, failure: Exception) -> None:
        """On rank 0: say once of each failure that there was one, and put off the next try."""
        if not self._world.is_main or failure is self._heard_of or not isinstance(failure, NotSaved):
            return
        self._heard_of = failure
        warn(f"{failure.in_short}; training goes on, and it is tried again")
        self._again_at = time.monotonic() + (0.0 if failure.freed else self._pause_s)
        self._pause_s = min(2 * self._pause_s, _AGAIN_LATER_S)

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
    def saved_step(self) -> int:
        """Of the last checkpoint that is complete; 0 before the first."""
        return 0 if self._writer is None else self._writer.written_step

    @property
    def saves(self) -> bool:
        """Whether what there is when all ranks stop has been saved."""
        return self._writer is not None

    def save_with(self, contents: Contents) -> None:
        """Have every checkpoint say what is trained and judged on."""
        self._contents = contents

    def close(self) -> None:
        """There will be no further step, on any rank."""
        self._vote.close()

    def _is_late(self) -> bool:
        """By rank 0's clock; while one is being written there is no hurry."""
        minutes = self._job.recipe.checkpoint.every_minutes
        if not self._world.is_main or self._writer is None or self._writer.under_way or self._told:
            return False
        if (failure := self._writer.failure) is not None:
            self._hear(failure)
            return time.monotonic() >= self._again_at
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

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
        self._await(writer)
        self._is_saving = True
        own = state.own()
        about = {"recipe": recipe_tables(recipe), "images": self._images, "saved_at": time.time()}
        about |= {} if self._contents is None else {"data": self._contents}
        writer.save(stamp, about | state.shared(), own)
