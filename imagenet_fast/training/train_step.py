"""Take one optimizer step: accumulate, synchronise, update."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import shipped_profile
from imagenet_fast.data.order import bits
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.metrics import RunResult
from imagenet_fast.metrics.trace import Trace
from imagenet_fast.models import compile_blocks
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.parallel.ddp import GradientSync, attach
from imagenet_fast.parallel.parallelize import ParallelModel, parallelize
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.loss import build_loss
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.nonfinite import NonFiniteCounter
from imagenet_fast.training.optimizers import build_optimizer, set_rate, total_norm
from imagenet_fast.training.precision import LossScaler, autocast, effective_precision, forward_dtype, set_float32_math
from imagenet_fast.training.state import TrainState


class TrainingStep:
    """One step on the next global batch, at a given learning rate, each time it is called."""

    def __init__(
        self,
        state: TrainState,
        backpropagate: Callable[[Tensor, Tensor], Tensor],
        cast: torch.autocast,
        clip_norm: float,
        accumulation: int,
        meter: Meter,
        trace: Trace | None,
    ) -> None:
        """Create a step that trains ``state``.

        Args:
            state: The training state.
            backpropagate: Runs forward and backward on images and labels; returns their part of the step's mean loss.
            cast: Context in which the model runs.
            clip_norm: Largest L2 norm of all gradients; 0: not clipped.
            accumulation: Batches per step that each rank reads.
            meter: Measures the steps.
            trace: Writes a timeline of a few steps; None: no timeline.
        """
        self.state = state
        self.cast = cast
        self.meter = meter
        self._backpropagate = backpropagate
        self._clip_norm = clip_norm
        self._accumulation = accumulation
        self._statistics = StepStatistics(state.model, accumulation, skips=state.scale.largest is not None)
        self._trace = trace

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor]], lr: float) -> None:
        """Train one step on the next batches of ``batches`` at the learning rate ``lr``."""
        state = self.state
        here.enter("data", state.step + 1)
        state.sync.zero_grad()
        self._statistics.begin()
        losses = []
        for left in reversed(range(self._accumulation)):
            images, labels = self.meter.fetch(batches)
            held = state.sync.no_sync() if left else nullcontext()
            with held, self._statistics.micro_step():
                losses.append(self._backpropagate(images, labels).detach())
        here.enter("sync")
        stats = state.sync.finish() if self._clip_norm else state.sync.end_backward()
        self.meter.add_step(stats, sum(losses[1:], losses[0]))
        if self._trace is not None:
            self._trace.end_step(stats)
        here.enter("update")
        self._statistics.end(state.sync.found_inf)
        self._update(lr)
        state.step += 1
        state.sent_bytes += stats.sent_bytes

    def abandon(self) -> None:
        """Take back what a step did to the state that was not ended."""
        self._statistics.begin()

    def _update(self, lr: float) -> None:
        """Update weights and their moving average, now or, if the engine defers, layer by layer in the next forward."""
        state, optimizer = self.state, self.state.optimizer
        set_rate(optimizer, lr)
        optimizer.found_inf = state.sync.found_inf
        optimizer.grad_scale = state.scale.end_step(optimizer.found_inf)
        if self._clip_norm:
            optimizer.grad_scale = self._clipping(optimizer.grad_scale)
        average = state.average
        state.sync.step(optimizer, then=() if average is None else [average.update])
        if average is not None:
            average.update_buffers()

    def _clipping(self, scale: Tensor | None) -> Tensor:
        """Return ``scale``, or more if the gradients divided by it would exceed the allowed norm.

        This is the rule of torch's ``clip_grad_norm_``. The gradients of all layers are present: recipes that clip
        refuse engines that defer.
        """
        division = self.state.division
        scale = torch.ones_like(self.state.scale.scale) if scale is None else scale
        norm = total_norm(self.state.optimizer.params, None if division is None else division.whole_norms)
        if division is not None:
            norm = division.length(norm)
        longest = self._clip_norm / (norm / scale + 1e-6)
        return scale / longest.clamp(max=1.0)


def build_step(
    recipe: Recipe,
    batching: Batching,
    model: nn.Module,
    world: DistContext,
    steps_per_epoch: int,
    trace: Path | None = None,
    clock: Clock | None = None,
    outcome: RunResult | None = None,
) -> TrainingStep:
    """Build the training step of ``model`` with the layout, engine, optimizer and precision of a recipe.

    Every rank must hold the same model at first. With a layout, the model is reduced in place to this rank's part.

    Args:
        recipe: The recipe.
        batching: Split of the global batch over ranks.
        model: The whole model, on this rank's device.
        world: This rank and its process group.
        steps_per_epoch: Optimizer steps in one epoch.
        trace: File for a timeline of a few steps; None: no timeline.
        clock: Clock of the run; None: the steps belong to no run.
        outcome: Result of the run; None: the steps belong to no run.
    """
    precision, _ = effective_precision(recipe.precision, world.bf16)
    set_float32_math(precision)
    parallel, cast, division = recipe.parallel, autocast(precision, world.device), None
    if parallel.ranks > 1:
        size = recipe.data.image_size
        images = torch.empty(
            batching.micro_batch, 3, size, size, dtype=forward_dtype(precision), device="meta",
            memory_format=torch.channels_last if recipe.channels_last else torch.contiguous_format,
        )  # fmt: skip
        division = parallelize(parallel, model, images, cast, shipped_profile(recipe.model.kind))
        model = division.own
    average = ModelEma(model, recipe.ema_decay) if recipe.ema_decay else None
    if recipe.compile:
        compile_blocks(model)
    if division is None:
        forward, sync = attach(model, recipe.sync, steps_per_epoch)
    else:
        forward, sync = model, division.synchronised(recipe.sync, steps_per_epoch)
    scale = LossScaler(precision, recipe.sync.wire, world.device)
    if scale.largest is not None:
        sync.guard(scale.largest)
    whole_norms = None if division is None else division.whole_norms
    optimizer = build_optimizer(recipe.optim, model, recipe.sync.velocity_momentum is not None, whole_norms)
    outcome = outcome or RunResult.of("", recipe, batching)
    streak = NonFiniteCounter(world.device)
    state = TrainState(model, division, average, optimizer, sync, scale, clock or Clock(), outcome, streak)
    return TrainingStep(
        state,
        _backpropagation(recipe, batching, forward, sync, cast, scale, division),
        cast,
        recipe.clip_norm,
        batching.accumulation,
        Meter(world, batching.global_batch, scale, streak, recipe.nonfinite_steps, outcome),
        Trace(model, world.device, trace) if trace is not None else None,
    )


def _backpropagation(
    recipe: Recipe, batching: Batching, forward: nn.Module, sync: GradientSync, cast: torch.autocast, scale: LossScaler,
    division: ParallelModel | None,
) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
    """Return the function that runs forward and backward on images, and returns what they add to the mean loss."""
    mean = build_loss(recipe.loss, recipe.label_smoothing)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = mean(logits, labels) / batching.accumulation
        return loss

    def backpropagate(images: Tensor, labels: Tensor) -> Tensor:
        here.enter("forward")
        with cast:
            loss = criterion(forward(images), labels)
        here.enter("backward")
        scale(loss).backward()
        return loss

    if division is None or not isinstance(forward, LocalStages):
        return backpropagate
    from imagenet_fast.parallel.pipeline_parallel import Pipeline  # loads torch's compiler: a second or two

    schedule, micro_batches = recipe.parallel.schedule, recipe.parallel.micro_batches
    pipeline = Pipeline(
        forward, division.layout.pipeline, schedule, micro_batches, criterion, sync, cast,
        activations=division.activations,
    )  # fmt: skip
    return partial(pipeline, scale=scale)


def seed_step(seed: int, step: int, world: DistContext) -> None:
    """Seed the generators of the CPU and of this rank's device by (seed, step, rank), as dropout uses them.

    Python's and NumPy's are seeded for networks that draw from these. So a resumed run draws the same numbers as an
    uninterrupted one. Compiled code and replayed CUDA graphs use the same generators. The CPU's generator uses 32 bits
    of a seed, a GPU's all 64.
    """
    number = int(bits("step", seed, step, of=world.rank)[0])
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index].manual_seed(number)
