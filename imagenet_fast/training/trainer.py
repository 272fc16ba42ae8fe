"""Train a recipe from its first image to its final weights. Whoever is new to the program reads this file first.

``Trainer.run`` is a run: claim its directory, open the data, build the model with its gradient engine and optimizer,
take steps, evaluate, save checkpoints, and record how it ended. ``training_step.py`` has what happens inside one step.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from imagenet_fast.checkpoint import NotSaved
from imagenet_fast.data.build import Loaders, build_loaders, example_images
from imagenet_fast.data.fingerprint import compare_data
from imagenet_fast.data.loader import StorageAway
from imagenet_fast.data.quarantine import left_out
from imagenet_fast.data.source import find_data
from imagenet_fast.distributed.cores import freeze_gc
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext, current_world
from imagenet_fast.distributed.messages import first_of_node, raise_on_all_ranks
from imagenet_fast.distributed.watchdog import report_failure
from imagenet_fast.errors import JobAborted, UserError
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.metrics.record import open_record
from imagenet_fast.models.weights import Weights
from imagenet_fast.recipe.batching import explain, split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import find_file, load_recipe
from imagenet_fast.run.ending import Ending
from imagenet_fast.run.result import Accuracy, RunResult
from imagenet_fast.run.run_dir import RunDir, new_folder
from imagenet_fast.training.checkpoint_manager import CheckpointManager, open_checkpoints, save_final_weights
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.evaluation import StopRequested, evaluate
from imagenet_fast.training.init_weights import build_initial_model, load_initial_weights
from imagenet_fast.training.lr_schedule import learning_rate
from imagenet_fast.training.nonfinite import NonFiniteLoss, describe_nonfinite
from imagenet_fast.training.optimizers import SGD
from imagenet_fast.training.precision import effective_precision, forward_dtype
from imagenet_fast.training.resume import ResumePoint, find_resumption
from imagenet_fast.training.run_lock import check_locked, claimed, describe_ended, make_room
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.training_step import TrainingStep, build_step, seed_step


class Trainer:
    """One run of a recipe, on this rank; all ranks make the same calls.

    ``run`` does everything. For single steps in code of one's own, call ``open_data`` and ``build``, then
    ``train_step`` and ``evaluate``; nothing is written then.
    """

    data: Loaders
    """Loaders of training and validation images; set by ``open_data``, as are the next three."""
    weights: Weights | None
    """Initial weights, on rank 0; None: fresh ones, or those of the checkpoint."""
    resumed_from: ResumePoint | None
    """Checkpoint from which the run resumes; None: it starts anew."""
    clock: Clock
    step: TrainingStep
    """Forward, backward, synchronisation and update; set by ``build``, as is ``state``."""
    state: TrainState
    """Model, optimizer, gradient engine and all else that later steps depend on."""

    def __init__(
        self, job: Job | Path | str, world: DistContext | None = None, *, data: Path | str | None = None,
        out: Path | str | None = None, overrides: Sequence[str] = (), ending: Ending | None = None,
        ask_first: Callable[[], Callable[[], bool]] | None = None,
    ) -> None:  # fmt: skip
        """Prepare a run; ``run`` or ``open_data`` is the first to read an image or to write a file.

        Args:
            job: The recipe, and the directories and options of the run. Or only the recipe's name or file, as ``train
                --recipe`` takes it; then the next arguments count.
            world: This rank and its process group; None: those that exist, or that torchrun's environment describes, or
                this process alone.
            data: Directory of the images; None: the default.
            out: Run directory; None: a new one in ``runs``.
            overrides: Changes of the recipe, as ``train --set`` takes them: "optim.lr=0.1".
            ending: Records how the run ends; None: only the run directory tells it.
            ask_first: Called once the run can be saved, from when on a signal asks this rank to stop. Returns a
                function, called in a thread too, that tells whether one has. None: Ctrl-C ends the run in the middle
                of a step.
        """
        self.world = world or current_world()
        if isinstance(job, Path | str):
            job = _job_by_name(str(job), self.world, None if data is None else Path(data), out, overrides)
        self.job = job
        precision, note = effective_precision(job.recipe.precision, self.world.bf16)
        self._dtype, self._note = forward_dtype(precision), note + job.note
        self.ending = ending or Ending(job, self.world, None)
        self.outcome: RunResult = self.ending.outcome
        self.metrics: MetricLogger = MetricLogger(lambda: self.clock.run_s())
        self.checkpoints: CheckpointManager | None = None
        self._ask_first = ask_first
        self._lr = 0.0  # of the last step

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's part of it."""
        return self.state.model

    @property
    def optimizer(self) -> SGD:
        """The optimizer."""
        return self.state.optimizer

    def run(self) -> RunResult:
        """Train to the end of the recipe, to its target or to a stop, and write the run directory.

        Returns:
            The outcome, which is also in ``outcome.json``.

        Raises:
            UserError: The run cannot start: from this directory, these images, or the given weights or checkpoint.
            JobAborted: It had to end early, for a reason that the message gives.
            KeyboardInterrupt: A signal ended it.
        """
        with ExitStack() as at_end:
            at_end.callback(gc.unfreeze)  # what lived in this run can then be collected
            with self._recorded():
                if (ended := at_end.enter_context(claimed(self.job, self.world))) is not None:
                    self.outcome = self.ending.outcome = ended
                    if self.world.is_main:
                        print(describe_ended(self.job, ended))
                else:
                    self.open_data()
                    self.build()
                    at_end.callback(self.training_step.close)
                    with self._saving():
                        freeze_gc()
                        unsaved = self._train_soundly()
                    if self.outcome.status in ("reached", "finished"):
                        save_final_weights(self.state, self.job, self.data.class_names, self.world, unsaved)
            with here.waiting():
                # a rank that missed the target exits with 3; if first, torchrun would stop those that still write
                dist.barrier()
        return self.outcome

    def open_data(self) -> None:
        """Find the checkpoint to resume from, open the images, and read the weights to start from.

        Raises:
            UserError: On every rank, if one of them cannot be used.
        """
        job, recipe, world = self.job, self.job.recipe, self.world
        self.resumed_from = found = find_resumption(job, world) if job.resume else None
        begun = 0 if found is None else found.step
        self.ending.saved_step = lambda: begun
        self.clock = Clock()
        with first_of_node(world):
            self.data = self._loaders(begun)
        compare_data(self.data.contents, world)
        self.weights = None
        if found is not None:
            found.check_data(self.data.contents)
            found.check_length(recipe.epochs, self.steps_per_epoch)
        elif job.init_from is not None:
            self.weights = load_initial_weights(
                job.init_from, recipe.model, self.data.classes, world, job.fresh_head, self.data.class_names
            )

    def build(self, model: nn.Module | None = None) -> None:
        """Build the model, its engine and its optimizer, and load the checkpoint. Call ``open_data`` first.

        Args:
            model: A model of one's own, the same on every rank, on its device; None: the recipe's.
        """
        job, recipe, world, found = self.job, self.job.recipe, self.world, self.resumed_from
        if model is None:
            trained = found is not None or self.weights is not None
            examples = None if trained else partial(example_images, recipe.data, job.data, recipe.seed)
            model = build_initial_model(recipe, self.data.classes, world, self.weights, examples)
        trace = RunDir(job.folder).trace if job.trace else None
        self.training_step = build_step(
            recipe, job.batching, model, world, self.steps_per_epoch, trace, self.clock, self.outcome
        )
        self.state = self.training_step.state
        if found is not None:
            self.resumed_from = found.load(self.state, world, recipe)

    def _loaders(self, first_step: int) -> Loaders:
        """Return loaders whose training images are those from step ``first_step`` on."""
        job, recipe, world = self.job, self.job.recipe, self.world
        return build_loaders(
            recipe.data, job.data, job.batching, world.rank, world.cores, world.device, recipe.seed, first_step,
            self._dtype, recipe.channels_last,
        )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return self.data.train_order.steps_per_epoch

    def train(self) -> None:
        """Train until the target is reached, the last epoch ends, or some rank was asked to stop."""
        job, recipe, state, outcome = self.job, self.job.recipe, self.state, self.outcome
        steps = recipe.epochs * self.steps_per_epoch
        self.metrics(
            "run", state.step, recipe=job.name, sync=recipe.sync.kind, world_size=self.world.size,
            global_batch=job.batching.global_batch, layout=recipe.parallel.layout(self.world.size),
            epochs=recipe.epochs, steps_per_epoch=self.steps_per_epoch, steps=steps, target_top1=recipe.target_top1,
            target_mirrored=recipe.target_mirrored, train_images=self.data.train_order.images,
            val_images=self.data.val_order.images, note=self._note,
        )  # fmt: skip
        if self.world.is_main and state.step < steps and outcome.status != "reached":
            RunDir(job.folder).final_weights.unlink(missing_ok=True)  # of an earlier end
        self.clock.begin_training()
        self.training_step.meter.restart()
        try:
            if state.needs_eval and self._evaluation_is_due():
                self._evaluate_and_save()
            while state.step < steps and outcome.status != "reached":
                if self.checkpoints is not None:
                    self.checkpoints.before_step(state)
                if state.step % self.steps_per_epoch == 0:
                    self.metrics("epoch", state.step, epoch=self.epoch)
                self.train_step()
                if self._evaluation_is_due():
                    self._evaluate_and_save()
            if outcome.status != "reached":
                outcome.status = "finished"
        except StopRequested:
            if self.checkpoints is not None:
                self.checkpoints.save_for_stop(state)
            outcome.status = "preempted"
        self.training_step.meter.flush(self.metrics)

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 1."""
        return self.state.step // self.steps_per_epoch + 1

    def train_step(self) -> None:
        """Take the next step: one global batch, at the learning rate of the recipe's schedule."""
        recipe, state, epoch = self.job.recipe, self.state, self.epoch
        self.clock.begin_training()
        self._lr = learning_rate(recipe.schedule, recipe.optim.lr, state.step, self.steps_per_epoch, recipe.epochs)
        seed_step(recipe.seed, state.step, self.world)
        self.training_step(self.data.train, self._lr)
        while self.training_step.news:
            self.metrics("graph", state.step, **self.training_step.news.pop(0))
        if state.step % recipe.log_every == 0:
            self.training_step.meter.report(self.metrics, state.step, epoch, self._lr)
        self.outcome.advance(epoch, state.step, self.clock.train_s(), state.sent_bytes)

    def evaluate(self) -> Accuracy:
        """Measure and record the accuracy on all validation images, of the averaged weights if the recipe averages.

        Raises:
            StopRequested: Some rank was asked to stop, which cut it off; nothing has changed.
        """
        state, meter, epoch = self.state, self.training_step.meter, -(-self.state.step // self.steps_per_epoch)
        if state.step > (self.resumed_from.step if self.resumed_from is not None else 0):
            meter.report(self.metrics, state.step, epoch, self._lr)
            meter.flush(self.metrics)
            self.outcome.advance(epoch, state.step, self.clock.train_s(), state.sent_bytes)
        here.enter("evaluation")
        state.settle()
        begun = self.clock.run_s()
        with self.clock.pause(), state.averaged_statistics():
            if self.checkpoints is not None:  # else a loop of one's own evaluates, and nothing would unfreeze again
                freeze_gc()
            asked = self.checkpoints.asked if self.checkpoints is not None else lambda: False
            recipe, cast = self.job.recipe, self.training_step.cast
            accuracy = evaluate(
                state.whole(), self.data, cast, self.world, asked, recipe.eval_mirror, recipe.eval_shift
            )
        eval_s = self.clock.run_s() - begun
        meter.restart()
        self.outcome.record_eval(accuracy, self.clock.run_s())
        self.metrics(
            "eval", state.step, epoch=epoch, eval_s=eval_s, train_s=self.clock.train_s(), **accuracy.measured()
        )
        return accuracy

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the training state: what ranks share, and this rank's own. Every rank must call it."""
        self.state.settle()
        return copy.deepcopy({"shared": self.state.shared(), "own": self.state.own()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict`` of the same rank, in a run with as many ranks, at the same images."""
        self.state.load(state["shared"], state["own"])
        self.training_step.meter.restart()
        self.data = self._loaders(self.state.step)

    def _evaluation_is_due(self) -> bool:
        epochs, steps = divmod(self.state.step, self.steps_per_epoch)
        return epochs > 0 and steps == 0 and self.job.recipe.evaluates_after(epochs)

    def _evaluate_and_save(self) -> None:
        self.evaluate()
        if self.checkpoints is not None:
            self.checkpoints.save(self.state, evaluated=True)

    def _train_soundly(self) -> NotSaved | None:
        """Train to the end or a stop; return why the end could not be saved, if so.

        The last step is checked for non-finite numbers here, as no step follows it.
        """
        outcome, checkpoints = self.outcome, self.checkpoints
        assert checkpoints is not None
        try:
            self.train()
            if outcome.status != "preempted" and not checkpoints.may_save(self.state):
                raise NonFiniteLoss
        except NonFiniteLoss:
            outcome.wrong_from, why = describe_nonfinite(self.state.streak, self.state.step)
            saved = checkpoints.last_saved()
            kept = f"the last checkpoint is that of step {saved}" if saved else "no checkpoint had been written"
            raise JobAborted(f"{why}; {kept}") from None
        except StorageAway as error:
            self.training_step.abandon()
            raise JobAborted(f"{error}; {self.job.going_on(checkpoints.save_alone(self.state))}") from None
        if outcome.status == "preempted":
            self.ending.stopped(checkpoints.saves)
            return None
        return checkpoints.finish(self.state, evaluated=True)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Save checkpoints in the block, in which a first signal only asks to stop.

        Only now, when nothing stands in the way of the run any more, is the run directory written.
        """
        job, world, at, ask_first = self.job, self.world, self.resumed_from, self._ask_first or (lambda: lambda: False)
        with raise_on_all_ranks():
            if world.is_main and at is None:
                make_room(job)
        with open_checkpoints(job, world, self.data.contents, ask_first, at) as checkpoints:
            self.checkpoints, self.ending.saved_step = checkpoints, lambda: checkpoints.saved_step
            self.metrics = open_record(job, world, self.clock.run_s, None if at is None else at.step)
            self.ending.begin_record(partial(check_locked, job.folder))
            if at is not None:
                self.metrics("resume", at.step, gap_s=at.gap_s, moved=at.elsewhere)
            yield

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record how the block ends."""
        ending = self.ending
        try:
            yield
        except KeyboardInterrupt:
            ending.stop("since it came again" if self._ask_first is not None else "in the middle of it")
            raise
        except Exception as error:
            ending.fail(report_failure(error))
            if ending.outcome.status == "failed":
                raise
            raise KeyboardInterrupt from None  # a signal ended another rank
        finally:
            outcome = ending.outcome
            if ending.begun:
                outcome.run_s = self.clock.run_s()
            ending.write(told=ending.begun and self.world.is_main)
            # Report the first failure, not that its record failed too.
            with suppress(UserError, OSError) if outcome.status == "failed" else nullcontext():
                if ending.begun:
                    self.metrics("end", outcome.steps, **vars(outcome))


def _job_by_name(
    named: str, world: DistContext, data: Path | None, out: Path | str | None, overrides: Sequence[str]
) -> Job:
    """Return the job of the recipe ``named``, a name or a file, for the ranks that are here."""
    path = find_file("recipe", named)
    folder = [out or new_folder(path.stem, "trainer")]
    dist.broadcast_object_list(folder, device=world.device)  # its name has the time
    recipe = load_recipe(path, overrides=overrides)
    batching = split_batch(recipe, world.size)
    root, keys = find_data(recipe.data, data), tuple(override.partition("=")[0].strip() for override in overrides)
    note = explain(recipe, recipe, batching) + left_out(root)
    return Job(
        path.stem, recipe, batching, root, Path(folder[0]).absolute(), note, command=tuple(sys.argv), overrides=keys
    )
