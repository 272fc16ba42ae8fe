"""Replay a layer profile by a model that only sleeps and has its gradients at once.

Each layer sleeps as long as it was recorded to compute. Every engine, and DDP, runs on it unmodified, and the CPU is
free for communication. As on an accelerator, communication does not slow compute down: if a layer wakes late, the next
ones sleep less.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Profile, Timing
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.pending import settle_all

Gradients = list[list[Tensor]]
"""Gradients by layer and parameter."""


def gradients_of(profile: Profile) -> Gradients:
    """Return random gradients of the profile's shapes, which all replays of it can share."""
    torch.manual_seed(0)
    return [[1e-3 * torch.randn(shape) for shape in layer.shapes] for layer in profile.layers]


def replay(profile: Profile, gradients: Gradients) -> nn.Sequential:
    """Build the sleeping model of a profile.

    It takes any tensor that requires a gradient, and returns a copy of it; backward yields the ``gradients``.
    """
    pace = Pace()
    return nn.Sequential(
        *(
            Replayed(pace, layer.forward_ms / 1e3, layer.backward_ms / 1e3, own)
            for layer, own in zip(profile.layers, gradients, strict=True)
        )
    )


def with_moves(timing: Timing, gradients: Gradients, buffer: GradientBuffer) -> Timing:
    """Return ``timing`` with the time added that moving ``gradients`` into ``buffer`` takes in backward.

    That time is measured here, as the fastest of three; the slowest rank counts. Every rank must call it, because the
    ranks of all simulated nodes share this node's memory.
    """
    sources = [gradient.flatten() for layer in reversed(gradients) for gradient in reversed(layer)]
    turns = []
    for _ in range(3):
        dist.barrier()
        begun, moments = time.perf_counter(), []
        for slot, source in zip(buffer.slots, sources, strict=True):
            buffer.values[slot.start : slot.flag].copy_(source)
            moments.append(time.perf_counter() - begun)
        turns.append(moments)
    late = torch.tensor(min(turns, key=lambda moments: moments[-1]))
    dist.all_reduce(late, dist.ReduceOp.MAX)
    ready = tuple(moment + more for moment, more in zip(timing.ready, late.tolist(), strict=True))
    return replace(timing, ready=ready, backward_s=timing.backward_s + late[-1].item())


class Pace:
    """A clock for many short sleeps whose total is accurate.

    A single sleep lasts too long, because an idle virtual CPU wakes late: ResNet-50's 1.48 s took up to 1.71 s.
    """

    def __init__(self) -> None:
        """Create a clock that has not overslept."""
        self._overslept = 0.0

    def nap(self, seconds: float) -> None:
        """Sleep for ``seconds``, less the time that earlier sleeps took too long."""
        begun, left = time.perf_counter(), seconds - self._overslept
        if left > 0:
            time.sleep(left)
        self._overslept = time.perf_counter() - begun - left


class Replayed(nn.Module):
    """A layer that sleeps instead of computing."""

    def __init__(self, pace: Pace, forward_s: float, backward_s: float, gradients: list[Tensor]) -> None:
        """Create zero parameters of the gradients' shapes.

        Args:
            pace: The clock that all layers of a model share.
            forward_s: Duration of forward in seconds.
            backward_s: Duration of backward in seconds.
            gradients: The parameters' gradients after backward.
        """
        super().__init__()
        for number, gradient in enumerate(gradients):
            self.register_parameter(f"param{number}", nn.Parameter(torch.zeros_like(gradient)))
        self._pace, self._forward_s, self._backward_s, self._gradients = pace, forward_s, backward_s, gradients

    def forward(self, x: Tensor) -> Tensor:
        """Sleep and return a copy of ``x``."""
        settle_all(self.parameters())  # as the torch functions of a real layer do
        out: Tensor = _Nap.apply(x, self._pace, self._forward_s, self._backward_s, self._gradients, *self.parameters())
        return out


class _Nap(torch.autograd.Function):
    """An autograd function that sleeps, and returns given gradients in backward."""

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
        # Aliases, so that autograd adopts them without a copy, as it does with gradients fresh from a kernel.
        return grad, None, None, None, None, *(gradient.detach() for gradient in ctx.gradients)
