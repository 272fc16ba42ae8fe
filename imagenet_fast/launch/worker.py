"""One rank of a training run, from its job to its outcome.

Our launcher starts it through ``__main__.py``, which reads the job. Under the user's own torchrun or srun, `cli/`
builds the job from the rank's command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from imagenet_fast.checkpoint import CheckpointWriter, expect_first
from imagenet_fast.data.loaders import Loaders, build_loaders, supply_of
from imagenet_fast.data.stall_advice import advice
from imagenet_fast.distributed.failure_detection import report_failure
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext, join
from imagenet_fast.distributed.rank_info import RankInfo, set_group_rank
from imagenet_fast.distributed.reductions import broadcast_error
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.launch.exit_status import Ending
from imagenet_fast.launch.job_setup import check_writable
from imagenet_fast.launch.resume import ResumePoint, common_folder, find_resumption
from imagenet_fast.launch.run_lock import CHECKPOINTS, claimed, move_record_aside
from imagenet_fast.launch.signals import Signals, end_on_signals
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.metrics.run_dir import open_run_dir
from imagenet_fast.metrics.run_result import STOPPED_WORDS, RunResult
from imagenet_fast.models.weights import describe, write_weights
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.init_weights import load_initial_weights
from imagenet_fast.training.nonfinite import NonFiniteLoss
from imagenet_fast.training.nonfinite_report import explain
from imagenet_fast.training.precision import forward_dtype
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.train_loop import build_initial_model, train
from imagenet_fast.training.train_step import TrainingStep, build_step


def run_worker(job: Job, place: RankInfo, patience_s: float, handover: Path | None = None) -> RunResult:
    """Join the other ranks, train or resume, and return the result.

    Rank 0 writes the outcome to the run directory. The first rank of each node writes it to ``handover`` too.

    Args:
        job: What to train.
        place: This process's rank.
        patience_s: Seconds to wait for the other ranks.
        handover: The launcher's directory; None without our launcher.

    Raises:
        UserError: If the ranks do not meet, were given different jobs, or cannot start from the given weights or
            checkpoint.
    """
    job = _restarted(job)
    if place.is_main:
        check_writable(job.folder, job.resume)
    if place.is_local_main and handover is not None:
        (handover / "outcome.json").unlink(missing_ok=True)  # of the previous attempt, if torchrun restarted the ranks
    set_group_rank(place)
    ending = Ending(job, place, handover)
    signals = end_on_signals(job.recipe.checkpoint.grace_s, ending.late)
    try:
        _train_in_world(job, place, patience_s, handover, ending, signals)
    except KeyboardInterrupt:
        if not ending.ended:  # during the start
            ending.stop()
            ending.leave()
    return ending.outcome


def _train_in_world(
    job: Job, place: RankInfo, patience_s: float, handover: Path | None, ending: Ending, signals: Signals
) -> None:
    outcome = ending.outcome

    def end(reason: str) -> None:
        """Write the outcome from another thread, as the training thread may be stuck."""
        ending.fail(reason)
        ending.leave()

    meeting, binding = timedelta(seconds=patience_s), job.recipe.numa_binding
    with (
        join(place, job.agreed(), meeting, job.recipe.timeout, end, job.folder, handover, binding) as world,
        claimed(job, world),
    ):
        resumption = find_resumption(job, world) if job.resume else None
        clock = Clock()
        dataset = _open_data(job, world, resumption)
        weights = None
        if job.init_from is not None and resumption is None:
            weights = load_initial_weights(job.init_from, job.recipe.model, dataset.classes, world, job.fresh_head)
        ending.begin_record()
        if world.is_main and resumption is None:
            move_record_aside(job.folder)
        record = open_run_dir(job, world, clock.run_s, resumption.step if resumption is not None else None)
        saved = False
        try:
            model = build_initial_model(job.recipe, dataset.classes, world, weights)
            take_step = _next_step(job, dataset, world, model, clock, outcome, resumption)
            begun = outcome.steps
            ending.saved_step = lambda: begun
            if resumption is not None:
                record("resume", resumption.step, gap_s=resumption.gap_s, moved=resumption.elsewhere)
            with keeping(job, world, dataset.train_order.images, signals, resumption is None) as keep:
                ending.saved_step = lambda: max(begun, keep.saved_step)
                unsaved = _train_soundly(job, dataset, world, take_step, record, keep)
            here.enter("checkpoint")
            if outcome.status in ("reached", "finished"):
                _write_final_weights(job, take_step.state, dataset, world)
                if unsaved:
                    raise JobAborted(f"trained to the end, but {unsaved}")
            saved = outcome.status != "interrupted"
        except KeyboardInterrupt:
            ending.stop()
            raise
        except Exception as error:
            ending.fail(report_failure(error))
            if outcome.status == "failed":
                raise
            raise KeyboardInterrupt from None  # a signal ended another rank
        finally:
            outcome.run_s = clock.run_s()
            ending.leave()
            # Report the first failure, not that its record failed too.
            with suppress(UserError, OSError) if outcome.status == "failed" else nullcontext():
                record("end", outcome.steps, **vars(outcome), advice=_advice(job, outcome, world))
                record.close()
                ending.told()
        if saved:
            with here.waiting():
                # A rank that missed the target exits with a non-zero code. If it were the first to exit, torchrun would
                # stop the ranks that still write.
                dist.barrier()


def _restarted(job: Job) -> Job:
    """Return ``job``, set to resume if torchrun has restarted the ranks after a loss."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return replace(job, resume=True) if again else job


def _open_data(job: Job, world: DistContext, resumption: ResumePoint | None) -> Loaders:
    """Build the loaders, at the next step. Raises UserError if the images differ from those of the checkpoint."""
    begin = 0 if resumption is None else resumption.step
    dataset = build_loaders(
        job.recipe.data, job.data, job.batching, world.rank, world.cores, world.device, job.recipe.seed,
        begin, forward_dtype(job.recipe.precision),
    )  # fmt: skip
    if resumption is not None:
        resumption.check_contents(dataset, job.recipe.model)
        resumption.check_images(dataset.train_order.images)
        resumption.check_length(job.recipe.epochs, dataset.train_order.steps_per_epoch)
    return dataset


def _next_step(
    job: Job, dataset: Loaders, world: DistContext, model: nn.Module, clock: Clock, outcome: RunResult,
    resumption: ResumePoint | None,
) -> TrainingStep:  # fmt: skip
    """Build the first step of ``model``, or the one after the checkpoint."""
    trace = job.folder / "trace.json" if job.trace and world.is_main else None
    steps_per_epoch = dataset.train_order.steps_per_epoch
    take_step = build_step(job.recipe, job.batching, model, world, steps_per_epoch, trace, clock, outcome)
    if resumption is not None:
        resumption.load(take_step.state, world)
        take_step.watched = resumption.wrong_from
    return take_step


def _train_soundly(
    job: Job,
    dataset: Loaders,
    world: DistContext,
    take_step: TrainingStep,
    record: MetricLogger,
    keep: CheckpointManager,
) -> str:
    """Train to the end or a stop; return why the end could not be saved, or an empty string.

    The last step is checked for non-finite numbers here, as no step follows it.

    Raises:
        JobAborted: If numbers are no longer finite.
    """
    keep.save_with(dataset.contents)
    outcome = take_step.state.outcome
    try:
        train(job, dataset, world, take_step, record, keep, keep.asked)
        if outcome.status in ("reached", "finished") and not keep.is_sound(take_step.state):
            raise NonFiniteLoss
    except NonFiniteLoss:
        raise JobAborted(explain(take_step, keep, world)) from None
    if outcome.status in ("reached", "finished"):
        return keep.finish(take_step.state, evaluated=True)
    if outcome.status == "preempted":
        outcome.message = f"{STOPPED_WORDS} after step {outcome.steps}, and "
        if keep.saves:
            outcome.message += "saved; the same command with --resume auto goes on"
        else:
            outcome.status = "interrupted"
            outcome.message += "not saved, as not every node sees the run; give an --out that all of them share"
    return ""


@contextmanager
def keeping(job: Job, world: DistContext, images: int, signals: Signals, is_new: bool) -> Iterator[CheckpointManager]:
    """Build the run's checkpoint manager for the block, in which the first signal asks this rank to stop.

    Args:
        job: What is trained.
        world: This rank among all.
        images: Number of training images.
        signals: Signal handlers of this rank.
        is_new: Whether the run starts without a checkpoint.

    Yields:
        The checkpoint manager. It saves nothing if not every node sees the run directory.

    Raises:
        UserError: If the job is elastic, and not every node sees the run directory.
    """
    root = common_folder(job.folder / CHECKPOINTS, world, make=True)
    if world.is_main and is_new and root is not None:
        with suppress(OSError):  # a full disk is reported when there is something to save
            expect_first(root)
    if root is None and job.elastic:
        raise UserError(
            f"not every node sees {job.folder}, where all go on when one leaves; give an --out that all of them share"
        )
    if root is None and world.is_main:
        warn(
            f"no checkpoints are written, since not every node sees {job.folder}; give an --out that all of them share"
        )
    store = dist.distributed_c10d._get_default_store()
    with nullcontext() if root is None else CheckpointWriter(root, world, store, job.recipe.checkpoint.keep) as writer:
        keep = CheckpointManager(job, world, writer, images, signals.ask_first(), store.clone())
        yield keep
        keep.close()


def _advice(job: Job, outcome: RunResult, world: DistContext) -> list[str]:
    """Return rank 0's advice for a run that waited for its images, unless the run failed."""
    data = job.recipe.data
    if not world.is_main or outcome.status == "failed" or not outcome.is_starved:
        return []
    if not isinstance(data, ImageData) or job.data is None:
        return []
    with suppress(UserError, OSError):  # the images may be gone by now
        return advice(outcome.data_wait_pct or 0.0, supply_of(data, job.data, world.cores, world.device))
    return []


def _write_final_weights(job: Job, state: TrainState, dataset: Loaders, world: DistContext) -> None:
    """Write the final weights on rank 0. Raises JobAborted, on every rank, if they cannot be written."""
    state.settle()
    whole = state.whole()
    failure = ""
    if world.is_main:
        about = describe(job.name, job.recipe, dataset.class_names)
        path = job.folder / FINAL_WEIGHTS
        try:
            write_weights(whole.state_dict(), path, about)
        except (OSError, SafetensorError) as error:
            failure = (
                f"trained to the end, but {path} cannot be written ({error}); see to that disk, and the same command "
                "with --resume auto writes them"
            )
    if failure := broadcast_error(failure, world.device):
        raise JobAborted(failure)
