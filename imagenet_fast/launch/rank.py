"""One rank, from its job to its outcome.

Our launcher starts it by ``__main__.py``, which reads the job. Under a torchrun or an srun of the user's own, `cli/`
has settled the job from the rank's command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import nn

from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.data.dataset import Dataset, open_dataset, supply_of
from imagenet_fast.data.starvation import advice
from imagenet_fast.errors import Fault, UserError, warn
from imagenet_fast.launch.planning import check_writable
from imagenet_fast.launch.resuming import CHECKPOINTS, Resumption, common_folder, find_resumption, hold
from imagenet_fast.launch.signals import Signals, end_on_signals
from imagenet_fast.models.weights import describe, write_weights
from imagenet_fast.ranks.place import Place, number_node
from imagenet_fast.ranks.roll_call import report_failure, reported_failure
from imagenet_fast.ranks.whereabouts import here
from imagenet_fast.ranks.world import World, join
from imagenet_fast.recipe.data_settings import ImageData
from imagenet_fast.recipe.job import Job
from imagenet_fast.record import Record
from imagenet_fast.record.opening import open_record
from imagenet_fast.record.outcome import Outcome
from imagenet_fast.record.past_runs import FINAL_WEIGHTS
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.diagnosis import explain
from imagenet_fast.training.keeping import Keeper
from imagenet_fast.training.loop import initial_model, train
from imagenet_fast.training.precision import forward_dtype
from imagenet_fast.training.starting import starting_weights
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.step import TrainingStep, build_step
from imagenet_fast.training.streak import NotFinite


def train_as_rank(job: Job, place: Place, patience_s: float, handover: Path | None = None) -> Outcome:
    """Join the others, waiting ``patience_s`` for them at most, and train, or go on training; how that ended.

    Rank 0 leaves the outcome in the run directory, the first rank of each node in ``handover`` too. Raises UserError
    where the ranks cannot meet, were given different jobs, or cannot start from the weights or go on from the
    checkpoint they were told to.
    """
    job = _restarted(job)
    if place.leads:
        check_writable(job.folder, job.resume)
    if place.leads_node and handover is not None:
        (handover / "outcome.json").unlink(missing_ok=True)  # of the ranks before, where torchrun starts them again
    number_node(place)
    signals = end_on_signals()
    outcome = Outcome.beginning(job)

    def end(reason: str) -> None:
        """By the thread beside this one, which may be stuck."""
        outcome.status, outcome.message = "failed", reason
        _leave(outcome, job, place, handover)

    meeting = timedelta(seconds=patience_s)
    with join(place, job.agreed(), meeting, job.recipe.timeout, end, job.folder, handover) as world:
        resumption = find_resumption(job, world) if job.resume else None
        clock = Clock()
        dataset = _open_data(job, world, resumption)
        weights = None
        if job.init_from is not None and resumption is None:
            weights = starting_weights(job.init_from, job.recipe.model, dataset.classes, world, job.fresh_head)
        record = open_record(job, world, clock.run_s, resumption.step if resumption is not None else None)
        if world.leads:
            hold(job.folder)
        try:
            model = initial_model(job.recipe, dataset.classes, world, weights)
            take_step = _next_step(job, dataset, world, model, clock, outcome, resumption)
            if resumption is not None:
                record("resume", resumption.step, gap_s=resumption.gap_s, moved=resumption.elsewhere)
            with keeping(job, world, dataset.train_order.images, signals) as keep:
                _train_soundly(job, dataset, world, take_step, record, keep)
            here.enter("checkpoint")
            if outcome.status in ("reached", "finished"):
                _write_final_weights(job, take_step.state, dataset, world)
        except KeyboardInterrupt:
            outcome.message = reported_failure()  # another rank's, after which torchrun has stopped this one
            outcome.status = "failed" if outcome.message else "interrupted"
        except Exception as error:
            outcome.status = "failed"
            outcome.message = report_failure(error)
            raise
        finally:
            outcome.run_s = clock.run_s()
            _leave(outcome, job, place, handover)
            # Why it failed is to be heard, not that its record did too.
            with suppress(UserError, OSError) if outcome.status == "failed" else nullcontext():
                record("end", outcome.steps, **vars(outcome), advice=_advice(job, outcome, world))
                record.close()
        if outcome.status in ("reached", "finished", "preempted"):
            with here.waiting():
                # A torchrun whose first rank to end had missed the target would interrupt those that write.
                dist.barrier()
    return outcome


def _restarted(job: Job) -> Job:
    """As torchrun has started it: again, where ranks have been lost."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return replace(job, resume=True) if again else job


def _open_data(job: Job, world: World, resumption: Resumption | None) -> Dataset:
    """At the step that comes next. Raises UserError, too, where the pictures are not those gone on with."""
    begin = 0 if resumption is None else resumption.step
    dataset = open_dataset(
        job.recipe.data, job.data, job.batching, world.rank, world.local_size, world.device, job.recipe.seed,
        begin, forward_dtype(job.recipe.precision),
    )  # fmt: skip
    if resumption is not None:
        resumption.check_pictures(dataset.train_order.images)
    return dataset


def _next_step(
    job: Job, dataset: Dataset, world: World, model: nn.Module, clock: Clock, outcome: Outcome,
    resumption: Resumption | None,
) -> TrainingStep:  # fmt: skip
    """The first step of ``model``, or the one that a checkpoint was waiting for."""
    trace = job.folder / "trace.json" if job.trace and world.leads else None
    steps_per_epoch = dataset.train_order.steps_per_epoch
    take_step = build_step(job.recipe, job.batching, model, world, steps_per_epoch, trace, clock, outcome)
    if resumption is not None:
        resumption.load(take_step.state, world)
        take_step.watched = resumption.wrong_from
    return take_step


def _train_soundly(
    job: Job, dataset: Dataset, world: World, take_step: TrainingStep, record: Record, keep: Keeper
) -> None:
    """To the end, or a stop. Raises Fault where numbers go wrong, of which the last step is one that nobody follows."""
    outcome = take_step.state.outcome
    try:
        train(job, dataset, world, take_step, record, keep)
        if outcome.status in ("reached", "finished") and not keep.is_sound(take_step.state):
            raise NotFinite
    except NotFinite:
        raise Fault(explain(take_step, keep, world)) from None
    if outcome.status == "preempted" and not keep.saves:
        outcome.status = "interrupted"


@contextmanager
def keeping(job: Job, world: World, images: int, signals: Signals) -> Iterator[Keeper]:
    """What saves the state of the run into its directory, while ``signals`` ask instead of ending this rank."""
    root = common_folder(job.folder / CHECKPOINTS, world, make=True)
    if root is None and job.elastic:
        raise UserError(
            f"not every node sees {job.folder}, where all go on when one leaves; give an --out that all of them share"
        )
    if root is None and world.leads:
        warn(
            f"no checkpoints are written, since not every node sees {job.folder}; give an --out that all of them share"
        )
    store = dist.distributed_c10d._get_default_store()
    with nullcontext() if root is None else CheckpointWriter(root, world, store, job.recipe.checkpoint.keep) as writer:
        keep = Keeper(job, world, writer, images, signals.ask_first())
        yield keep
        keep.close()


def _leave(outcome: Outcome, job: Job, place: Place, handover: Path | None) -> None:
    if place.leads and job.folder.is_dir():
        with suppress(OSError):  # of a full disk there is a sentence already, and another place to leave it
            outcome.write(job.folder)
    speaks = place.leads_node or outcome.message  # the node's first rank may be the one that is lost
    if handover is not None and speaks:
        outcome.write(handover)


def _advice(job: Job, outcome: Outcome, world: World) -> list[str]:
    """What rank 0 says of a run that waited for its pictures, unless there is worse to be said."""
    data = job.recipe.data
    if not world.leads or outcome.status == "failed" or not outcome.is_starved:
        return []
    if not isinstance(data, ImageData) or job.data is None:
        return []
    with suppress(UserError, OSError):  # of pictures that are gone since
        return advice(outcome.data_wait_pct or 0.0, supply_of(data, job.data, world.local_size, world.device))
    return []


def _write_final_weights(job: Job, state: TrainState, dataset: Dataset, world: World) -> None:
    state.settle()
    whole = state.whole()
    if world.leads:
        about = describe(job.name, job.recipe, dataset.class_names)
        write_weights(whole.state_dict(), job.folder / FINAL_WEIGHTS, about)
