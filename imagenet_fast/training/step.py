"""One optimiser step: accumulate, synchronise, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from imagenet_fast.cost.profile import shipped_profile
from imagenet_fast.models import compile_blocks
from imagenet_fast.models.stages import Part
from imagenet_fast.parallel.division import Division, divide
from imagenet_fast.parallel.pipeline import Pipeline
from imagenet_fast.ranks.world import World
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.sync import GradientSync, attach
from imagenet_fast.sync.engine import Elements
from imagenet_fast.sync.trace import TracedSteps
from imagenet_fast.training.averaging import MovingAverage
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.optimizers import MomentumSGD, build_optimizer, gradients
from imagenet_fast.training.precision import LossScale, autocast, set_float32_math
from imagenet_fast.training.statistics import StepStatistics


class TrainingStep:
    """Calling it takes one step from the next global batch, at a given rate."""

    def __init__(
        self,
        backpropagate: Callable[[Tensor, Tensor], Tensor],
        sync: GradientSync,
        optimizer: MomentumSGD,
        cast: torch.autocast,
        scale: LossScale,
        clip_norm: float,
        accumulation: int,
        statistics: StepStatistics,
        meter: Meter,
        trace: TracedSteps | None,
        model: nn.Module,
        division: Division | None,
        average: MovingAverage | None,
    ) -> None:
        self._backpropagate = backpropagate
        self._sync = sync
        self._optimizer = optimizer
        self._scale = scale
        self._clip_norm = clip_norm
        self._accumulation = accumulation
        self._statistics = statistics
        self._trace = trace
        self._model = model
        self._division = division
        self.cast = cast
        self.meter = meter
        self.average = average
        """Follows the weights as they are updated, which an engine may put off: up to date after ``settle``."""

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor]], lr: float) -> None:
        self._sync.zero_grad()
        for left in reversed(range(self._accumulation)):
            images, labels = self.meter.fetch(batches)
            with self._sync.no_sync() if left else nullcontext(), self._statistics.micro_step():
                loss = self._backpropagate(images, labels)
            self.meter.add_loss(loss)
        stats = self._sync.finish()
        self.meter.add_step(stats)
        if self._trace is not None:
            self._trace.end_step(stats)
        found_inf = self._sync.found_inf
        factor = self._scale.end_step(found_inf)
        if self._clip_norm:
            factor = self._clipped(factor)
        self._sync.update(partial(self._update, lr, factor, found_inf))
        if self.average is not None:
            self.average.update_buffers()

    def settle(self) -> None:
        """Bring every weight up to date, where the engine leaves that to the next forward."""
        self._sync.settle()

    def judged(self) -> nn.Module:
        """What is evaluated and saved, once settled: the moving average where there is one, else the model; whole, even
        where each rank trains a part. Every rank must ask for it."""
        trained = self.average.module if self.average is not None else self._model
        return trained if self._division is None else self._division.whole(trained)

    def _clipped(self, factor: Tensor | None) -> Tensor:
        """``factor``, or less where the gradients that it multiplies would be longer than is allowed; as torch's
        ``clip_grad_norm_`` has it. Gradients of all layers are here: engines that defer are refused."""
        factor = torch.ones_like(self._scale.scale) if factor is None else factor
        norm = self._optimizer.gradient_norm()
        if self._division is not None:
            norm = self._division.length(norm)
        longest = self._clip_norm / (factor * norm + 1e-6)
        return factor * longest.clamp(max=1.0)

    def _update(
        self, lr: float, factor: Tensor | None, found_inf: Tensor | None, params: list[nn.Parameter],
        elements: Elements | None = None,
    ) -> None:  # fmt: skip
        if factor is not None:
            torch._foreach_mul_(gradients(params), factor)
        self._optimizer.step(lr, params, found_inf, elements)
        if self.average is not None:
            self.average.update(params)


def build_step(
    recipe: Recipe, batching: Batching, model: nn.Module, world: World, steps_per_epoch: int, trace: Path | None = None
) -> TrainingStep:
    """Give ``model`` the layout, engine, optimiser and precision that a recipe names; ``trace`` a few steps to a file.

    Every rank holds the same model at first. With a layout it is left, in place, what is this rank's of it.
    """
    set_float32_math(recipe.precision)
    parallel, cast, division = recipe.parallel, autocast(recipe.precision, world.device), None
    if parallel.ranks > 1:
        size = recipe.data.image_size
        images = torch.empty(batching.micro_batch, 3, size, size, device="meta", memory_format=torch.channels_last)
        division = divide(parallel, model, images, cast, shipped_profile(recipe.model.kind))
        model = division.own
    average = MovingAverage(model, recipe.ema_decay) if recipe.ema_decay else None
    if recipe.compile:
        compile_blocks(model)
    if division is None:
        forward, sync = attach(model, recipe.sync, steps_per_epoch)
    else:
        forward, sync = model, division.synchronised(recipe.sync, steps_per_epoch)
    scale = LossScale(recipe.precision, recipe.sync.wire, world.device)
    if scale.largest is not None:
        sync.guard(scale.largest)
    whole_norms = None if division is None else division.whole_norms
    return TrainingStep(
        _backpropagation(recipe, batching, forward, sync, cast, scale, division),
        sync,
        build_optimizer(recipe.optim, model, recipe.sync.brings_momentum, whole_norms),
        cast,
        scale,
        recipe.clip_norm,
        batching.accumulation,
        StepStatistics(model, batching.accumulation),
        Meter(world, batching.global_batch),
        TracedSteps(model, world.device, trace) if trace is not None else None,
        model,
        division,
        average,
    )


def _backpropagation(
    recipe: Recipe, batching: Batching, forward: nn.Module, sync: GradientSync, cast: torch.autocast, scale: LossScale,
    division: Division | None,
) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
    """Forward and backward of what a rank reads at once: what it adds to the mean loss of a step."""
    mean = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = mean(logits, labels) / batching.accumulation
        return loss

    def backpropagate(images: Tensor, labels: Tensor) -> Tensor:
        with cast:
            loss = criterion(forward(images), labels)
        scale(loss).backward()
        return loss

    if division is None or not isinstance(forward, Part):
        return backpropagate
    schedule, micro_batches = recipe.parallel.schedule, recipe.parallel.micro_batches
    pipeline = Pipeline(
        forward, division.layout.pipeline, schedule, micro_batches, criterion, sync, cast,
        activations=division.activations,
    )  # fmt: skip
    return partial(pipeline, scale=scale)
