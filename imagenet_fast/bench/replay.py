"""A model that only takes time: each layer sleeps as long as it was recorded to compute, and has gradients at once.

Any engine, and DDP, runs on it unmodified, and the processor is left to communication. Like an accelerator's, its pace
is its own: a layer that was woken late makes up for it in the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.timing import Timing
from imagenet_fast.sync import GradientPool, ParamSlot

Gradients = list[list[Tensor]]
"""By layer, of each of its parameters."""


def gradients_of(profile: Profile) -> Gradients:
    """Random gradients of the profile's shapes, which all replays of it may share."""
    torch.manual_seed(0)
    return [[1e-3 * torch.randn(shape) for shape in layer.shapes] for layer in profile.layers]


def replay(profile: Profile, gradients: Gradients) -> nn.Sequential:
    """The model of a profile. It takes and returns any tensor that requires a gradient."""
    pace = Pace()
    return nn.Sequential(
        *(
            Replayed(pace, layer.forward_ms / 1e3, layer.backward_ms / 1e3, own)
            for layer, own in zip(profile.layers, gradients, strict=True)
        )
    )


def timing_of(profile: Profile, model: nn.Sequential, spans: Sequence[ParamSlot]) -> Timing:
    """A step's course over the ``spans`` of the profile's replayed ``model``, by the recorded times."""
    course = profile.timing
    places: dict[nn.Module | None, int] = {module: place for place, module in enumerate(reversed(list(model)))}
    own = [places[span.module] for span in spans]
    return replace(course, needed=tuple(course.needed[n] for n in own), ready=tuple(course.ready[n] for n in own))


def with_moves(timing: Timing, gradients: Gradients, pool: GradientPool) -> Timing:
    """The course of a backward whose ``gradients`` are moved into ``pool``, which is timed here, the fastest of three.

    Every rank must call it: those of all hosts share this machine's memory.
    """
    sources = [gradient.flatten() for layer in reversed(gradients) for gradient in reversed(layer)]
    turns = []
    for _ in range(3):
        dist.barrier()
        begun, moments = time.perf_counter(), []
        for span, source in zip(pool.spans, sources, strict=True):
            pool.buffer[span.start : span.flag].copy_(source)
            moments.append(time.perf_counter() - begun)
        turns.append(moments)
    late = torch.tensor(min(turns, key=lambda moments: moments[-1]))
    dist.all_reduce(late, dist.ReduceOp.MAX)
    ready = tuple(moment + more for moment, more in zip(timing.ready, late.tolist(), strict=True))
    return replace(timing, ready=ready, backward_s=timing.backward_s + late[-1].item())


class Pace:
    """Sleeps so that many naps last as long as they should together.

    A nap by itself lasts longer: an idle virtual processor wakes late, and ResNet-50's 1.48 s lasted up to 1.71.
    """

    def __init__(self) -> None:
        self._overslept = 0.0

    def nap(self, seconds: float) -> None:
        begun, left = time.perf_counter(), seconds - self._overslept
        if left > 0:
            time.sleep(left)
        self._overslept = time.perf_counter() - begun - left


class Replayed(nn.Module):
    """A layer: parameters of its shapes, and its times in seconds."""

    def __init__(self, pace: Pace, forward_s: float, backward_s: float, gradients: list[Tensor]) -> None:
        super().__init__()
        for number, gradient in enumerate(gradients):
            self.register_parameter(f"param{number}", nn.Parameter(torch.zeros_like(gradient)))
        self._pace, self._forward_s, self._backward_s, self._gradients = pace, forward_s, backward_s, gradients

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Nap.apply(x, self._pace, self._forward_s, self._backward_s, self._gradients, *self.parameters())
        return out


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pace: Pace, forward_s: float, backward_s: float, gradients: list[Tensor], *params: Tensor
    ) -> Tensor:
        ctx.pace, ctx.backward_s, ctx.gradients = pace, backward_s, gradients
        pace.nap(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pace.nap(ctx.backward_s)
        # Aliases: autograd then takes them over without a copy, as it does with gradients fresh from a kernel.
        return grad, None, None, None, None, *(gradient.detach() for gradient in ctx.gradients)
