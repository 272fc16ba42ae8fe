"""Decide when to save the training state and when to stop, the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial

import torch.distributed as dist

from imagenet_fast.checkpoint import CheckpointWriter, NotSaved, Stamp
from imagenet_fast.checkpoint.folder import set_aside
from imagenet_fast.data.fingerprint import Contents
from imagenet_fast.distributed.board import Board
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.messages import common_folder, raise_on_all_ranks
from imagenet_fast.distributed.step_agreement import StepAgreement
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.models.weights import describe, write_weights
from imagenet_fast.recipe.job import Job, recipe_tables
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.evaluation import StopRequested
from imagenet_fast.training.nonfinite import NonFiniteLoss
from imagenet_fast.training.resume import ResumePoint
from imagenet_fast.training.run_lock import check_locked
from imagenet_fast.training.state import TrainState

_ALONE_S = 600.0  # that a rank may take to save alone, while others wait


class CheckpointManager:
    """Policy that decides between steps whether to save a checkpoint and whether to stop.

    It saves when the recipe asks for it, after evaluations, and before a stop. It does not save a state with non-finite
    values, unless the recipe's ``nonfinite_steps`` is 0. A failed save does not end the training: rank 0 warns, and all
    ranks save again when the next checkpoint is due, and at the end.
    """

    def __init__(
        self, job: Job, world: DistContext, writer: CheckpointWriter | None, data: Contents,
        asked: Callable[[], bool], begun: int = 0,
    ) -> None:  # fmt: skip
        """Create a manager for one run; every rank must call it.

        Args:
            job: The run and its recipe.
            world: This rank.
            writer: Writer of the checkpoints; None: nothing is saved.
            data: The images, noted in each checkpoint.
            asked: Returns whether this rank has been asked to stop; called in a thread, too.
            begun: Step of the checkpoint from which the run resumes; 0: none.
        """
        self._job = job
        self._world = world
        self._writer = writer
        self._data = data
        self._asked = asked
        self._saved_at = time.monotonic()
        self._begun = self._last = begun  # last: the step of the last checkpoint that was begun
        self._unsaved: NotSaved | None = None
        self._agreement = StepAgreement(world, begun, self._wishes)

    def asked(self) -> bool:
        """Return whether any rank has been asked to stop, for use between steps; others hear of it up to 1 s later."""
        return self._agreement.hears("stop")

    def before_step(self, state: TrainState) -> None:
        """Save a checkpoint if one is due after the last step. Raise StopRequested if all ranks stop there."""
        if state.step == self._begun:
            return
        if self._world.is_main and not self._writing:
            self._await()  # warns at once if it has failed
        due, every_steps = self._agreement.due(state.step), self._job.recipe.checkpoint.every_steps
        if "stop" in due:
            raise StopRequested
        if state.step != self._last and ("save" in due or (every_steps > 0 and state.step % every_steps == 0)):
            self.save(state, evaluated=False)

    def save(self, state: TrainState, evaluated: bool) -> bool:
        """Save a checkpoint, of ``evaluated`` weights or not, if there is a writer; return whether ``may_save``."""
        if self._writer is None:
            return True
        self._saved_at = time.monotonic()
        if may_save := self.may_save(state):
            self._save(state, evaluated)
        return may_save

    def save_for_stop(self, state: TrainState) -> None:
        """Save a checkpoint unless there is one of this step; raise NonFiniteLoss or JobAborted if it cannot be."""
        if state.step != self._last and not self.save(state, evaluated=False):
            raise NonFiniteLoss
        if unsaved := self.finish(state, evaluated=False):
            raise JobAborted(str(unsaved))

    def finish(self, state: TrainState, evaluated: bool) -> NotSaved | None:
        """Wait for the checkpoint of the last step, and save ``state`` once more if it fails.

        Returns:
            Why it could not be saved, the same on every rank; None if it was saved, or if there is no writer.
        """
        self._await()
        if self._unsaved is not None:
            self._save(state, evaluated)
            self._await(last=True)
            if self._world.size > 1:
                with here.waiting():
                    dist.barrier()  # the store, where others may still read why, may end with rank 0
        return self._unsaved

    def save_alone(self, state: TrainState) -> int:
        """Save the state on this rank alone, while others wait for it in the next step; return ``saved_step``.

        Of several ranks that call it, the first saves, and the others wait. A run that resumes takes it as one of
        another number of ranks. Of a model that is divided over ranks no rank can save all.
        """
        saved = self.last_saved()
        if self._writer is None or state.division is not None:
            return saved
        board = Board(dist.distributed_c10d._get_default_store(), "keeper")
        if board.first("alone", self._world.rank) == self._world.rank:
            if state.step > saved and self.may_save(state, alone=True):
                self._writer = self._writer.alone()
                self._save(state, evaluated=False, ranks=1)
                self._await(last=True)
            board.post("saved", max(saved, self.saved_step))
        with here.waiting():
            return int(board.read("saved", time.monotonic() + _ALONE_S) or saved)

    @property
    def _writing(self) -> bool:
        return self._writer is not None and self._writer.under_way

    def _await(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written, if any, and note whether it failed.

        Rank 0 warns once, unless it was the ``last`` try.
        """
        if self._writer is None:
            return
        if self._writing:
            here.enter("checkpoint")
        try:
            self._writer.wait()
        except NotSaved as error:
            self._unsaved = error
            if self._world.is_main and not last:
                warn(f"{error.in_short}; training goes on, and it is tried again")

    def may_save(self, state: TrainState, alone: bool = False) -> bool:
        """Settle ``state`` and return whether it may replace earlier checkpoints: it is finite.

        Always true if the recipe's ``nonfinite_steps`` is 0. Every rank must call it, unless it is about this one
        ``alone``.
        """
        here.enter("checkpoint")
        state.settle()
        return self._job.recipe.nonfinite_steps == 0 or (state.is_sound() if alone else state.is_finite())

    def last_saved(self) -> int:
        """Wait for the checkpoint that is being written, and return ``saved_step``."""
        self._await()
        return self.saved_step

    @property
    def saved_step(self) -> int:
        """Step from which the run would resume now; 0: it would begin again."""
        return self._begun if self._writer is None else max(self._begun, self._writer.written_step)

    @property
    def saves(self) -> bool:
        """True if the state is saved when all ranks stop."""
        return self._writer is not None

    def close(self) -> None:
        """End the thread; no rank may take a further step."""
        self._agreement.close()

    def _wishes(self) -> set[str]:
        """Return what this rank wishes: to stop if it was asked to, to save if that is due by rank 0's clock."""
        wishes, minutes = {"stop"} if self._asked() else set(), self._job.recipe.checkpoint.every_minutes
        if minutes > 0 and self._world.is_main and self._writer is not None and not self._writing:
            wishes |= {"save"} if time.monotonic() - self._saved_at >= 60 * minutes else set()
        return wishes

    def _save(self, state: TrainState, evaluated: bool, ranks: int = 0) -> None:
        """Begin to save the state as that of so many ranks; 0: of those there are."""
        assert self._writer is not None
        recipe, outcome, ranks = self._job.recipe, state.outcome, ranks or self._world.size
        top1, layout = outcome.top1 if evaluated else None, recipe.parallel.axes(ranks)
        stamp = Stamp(step=state.step, epoch=outcome.epochs, world=ranks, layout=layout, top1=top1)
        self._await()
        self._unsaved, self._last = None, state.step
        own = state.own()
        about = {"recipe": recipe_tables(recipe), "saved_at": time.time(), "data": self._data}
        self._writer.save(stamp, about | state.shared(), own)


@contextmanager
def open_checkpoints(
    job: Job, world: DistContext, data: Contents, ask_first: Callable[[], Callable[[], bool]],
    resumed: ResumePoint | None,
) -> Iterator[CheckpointManager]:  # fmt: skip
    """Build the run's checkpoint manager for the block. It saves nothing if not every node sees the run directory.

    Args:
        job: The run and its recipe.
        world: This rank.
        data: The images, noted in each checkpoint.
        ask_first: Called before the block, from when on a signal asks this rank to stop. Returns a function that tells
            whether one has.
        resumed: Checkpoint from which the run resumes, which all ranks see; None: none.

    Raises:
        UserError: Not every node sees the run directory, and the job says that the same command is to resume it.
    """
    if resumed is None:
        root, begun = common_folder(RunDir(job.folder).checkpoints, world, make=True), 0
    else:
        root, begun = resumed.checkpoint.folder.parent, resumed.step
        if world.is_main:
            set_aside(resumed.checkpoint.damaged)
    if root is None:
        unseen, fix = f"not every node sees {job.folder}", "give an --out that all of them share"
        if job.resume:
            raise UserError(f"{unseen}, so there would be no checkpoint to resume from; {fix}")
        if world.is_main:
            warn(f"no checkpoints are written, since {unseen}; {fix}")
    store, keep = dist.distributed_c10d._get_default_store(), job.recipe.checkpoint.keep
    check = partial(check_locked, job.folder) if world.is_main else lambda: None
    writing = nullcontext() if root is None else CheckpointWriter(root, world, store, keep, check_root=check)
    with writing as writer, closing(CheckpointManager(job, world, writer, data, ask_first(), begun)) as manager:
        yield manager


def save_final_weights(
    state: TrainState, job: Job, class_names: Sequence[str], world: DistContext, unsaved: NotSaved | None
) -> None:
    """Write the final weights on rank 0: with them a run has ended, even if its last checkpoint is ``unsaved``.

    Raises:
        JobAborted: On every rank, if they cannot be written.
    """
    here.enter("checkpoint")
    state.settle()
    whole, path = state.whole(), RunDir(job.folder).final_weights
    with raise_on_all_ranks():
        if world.is_main:
            try:
                check_locked(job.folder)
                path.parent.mkdir(exist_ok=True)
                write_weights(whole.state_dict(), path, describe(job.name, job.recipe, class_names))
            except OSError as error:
                then = f", and {unsaved}" if unsaved else f"; see to that disk, and {job.resuming} writes them"
                raise JobAborted(f"trained to the end, but {path} cannot be written ({error}){then}") from None
            if unsaved is not None:
                warn(f"{unsaved.in_short}; the final weights are written, so the run has ended all the same")
