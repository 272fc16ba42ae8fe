"""Take one optimizer step: accumulate, synchronise, update."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import shipped_profile
from imagenet_fast.data.order import bits
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.metrics.trace import TRACED, Trace
from imagenet_fast.models import compile_blocks, fuse_norms
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.parallel.ddp import GradientSync, attach
from imagenet_fast.parallel.parallelize import ParallelModel, parallelize
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync import GradientPool, SyncStats
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.loss import build_loss
from imagenet_fast.training.lr_schedule import keep_rates_on, set_rate
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.optimizers import build_optimizer, total_norm
from imagenet_fast.training.precision import LossScaler, autocast, effective_precision, forward_dtype, set_float32_math
from imagenet_fast.training.state import TrainState
from imagenet_fast.training.step_graph import MOST_MICRO_STEPS, StepGraphs


class TrainingStep:
    """One step on the next global batch, at a given learning rate, each time it is called."""

    graphs: StepGraphs | None = None
    """CUDA graphs that the steps are replayed from, once steps repeat each other; None: all are launched."""

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
        self.news: list[dict[str, Any]] = []
        """Events of the name ``graph`` that are not recorded yet: whether steps are replayed, and why not."""
        self._backpropagate = backpropagate
        self._clip_norm = clip_norm
        self._accumulation = accumulation
        self._statistics = StepStatistics(state.model, accumulation, skips=state.scale.largest is not None)
        self._trace = trace
        self._left_to_launch = 0  # before steps are replayed

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor]], lr: float) -> None:
        """Train one step on the next batches of ``batches`` at the learning rate ``lr``."""
        state = self.state
        here.enter("data", state.step + 1)
        set_rate(state.optimizer, lr)
        fetched = (self.meter.fetch(batches) for _ in range(self._accumulation))
        if self.graphs is None or self.graphs.gave_up or self._left_to_launch > 0:
            self._left_to_launch -= 1
            stats = self._launch(fetched)
        else:
            stats = self.graphs.take_step(list(fetched))
        self.meter.add_step(stats)
        state.step += 1
        state.sent_bytes += stats.sent_bytes

    def _launch(self, batches: Iterable[tuple[Tensor, Tensor]]) -> SyncStats:
        """Take a step, one operation after the other. All that it changes, but for ``sync``, are tensors."""
        state = self.state
        state.sync.zero_grad()
        self._statistics.begin()
        losses: list[Tensor] = []
        for images, labels in batches:
            is_last = len(losses) == self._accumulation - 1
            with nullcontext() if is_last else state.sync.no_sync(), self._statistics.micro_step():
                losses.append(self._backpropagate(images, labels).detach())
        here.enter("sync")
        stats = state.sync.finish() if self._clip_norm else state.sync.end_backward()
        self.meter.add_loss(sum(losses[1:], losses[0]))
        if self._trace is not None:
            self._trace.end_step(stats)
        here.enter("update")
        self._statistics.end(state.sync.found_inf)
        self._update()
        return stats

    def replay_from(self, pool: GradientPool, checks: bool, after: int) -> None:
        """Replay steps, whose gradients are in ``pool``, from CUDA graphs once ``after`` steps have been taken."""
        modules = list(self.state.model.modules())

        def changed() -> dict[str, list[Tensor]]:
            sent = {"gradients": [pool.gradients.values], "residuals": pool.engine.residuals()}
            return self.state.changed() | sent | {"losses": [self.meter.loss]}

        def settings() -> object:
            groups = self.state.optimizer.param_groups
            values = (value for group in groups for name, value in group.items() if name != "params")
            modes = (module.training for module in modules)
            return *(id(value) if isinstance(value, Tensor) else value for value in values), *modes

        def launch(batches: Iterable[tuple[Tensor, Tensor]]) -> SyncStats:
            try:
                return self._launch(batches)
            except BaseException:
                self._statistics.forget()  # if it was captured, nothing of it has run
                raise

        self._left_to_launch = after
        self.graphs = StepGraphs(pool, launch, changed, settings, self.news.append, checks)

    def close(self) -> None:
        """Let go of CUDA graphs, without which no process group whose messages they hold could end."""
        if self.graphs is not None:
            self.graphs.reset()

    def abandon(self) -> None:
        """Take back what a step did to the state that was not ended."""
        self._statistics.begin()

    def _update(self) -> None:
        """Update weights and their moving average, now or, if the engine defers, layer by layer in the next forward."""
        state, optimizer = self.state, self.state.optimizer
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
        trace: File for a timeline of a few steps, which rank 0 writes; None: no timeline.
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
    fuse_norms(model, recipe, world.device, forward_dtype(precision), world.is_main)
    if division is None:
        forward, sync = attach(model, recipe.sync, steps_per_epoch)
    else:
        forward, sync = model, division.synchronised(recipe.sync, steps_per_epoch)
    scale = LossScaler(precision, recipe.sync.wire, world.device)
    if scale.largest is not None:
        sync.guard(scale.largest)
    whole_norms = None if division is None else division.whole_norms
    optimizer = build_optimizer(recipe.optim, model, recipe.sync.velocity_momentum is not None, whole_norms)
    if world.device.type == "cuda":
        keep_rates_on(optimizer, world.device)
    outcome = outcome or RunResult.of("", recipe, batching)
    meter = Meter(world, batching.global_batch, scale, recipe.nonfinite_steps, outcome)
    state = TrainState(model, division, average, optimizer, sync, scale, clock or Clock(), outcome, meter.streak)
    step = TrainingStep(
        state,
        _backpropagation(recipe, batching, forward, sync, cast, scale, division),
        cast,
        recipe.clip_norm,
        batching.accumulation,
        meter,
        Trace(model, world.device, trace) if trace is not None and world.is_main else None,
    )
    if world.device.type == "cuda" and recipe.graph:
        many = f"a step has {batching.accumulation} micro-steps, and a graph holds {MOST_MICRO_STEPS} at most"
        if why := recipe.unreplayable or (many if batching.accumulation > MOST_MICRO_STEPS else ""):
            step.news.append({"replayed": False, "why": why})
        else:
            assert isinstance(sync, GradientPool)
            step.replay_from(sync, recipe.graph == "auto", TRACED.stop if trace is not None else 0)
    return step


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
        here.enter("forward", shape=images.shape)  # of a new size blocks are compiled anew
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
