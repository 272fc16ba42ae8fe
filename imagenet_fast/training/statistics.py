"""Batch-norm running statistics over a step of several micro-batches.

Norms update their running statistics at every forward, so four micro-steps of one rank would move them four times as
far as one step of four ranks does. Here every micro-step starts from the statistics that the step began with, and what
they leave is averaged: as if each were a rank of its own, whose statistics are averaged before an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StepStatistics:
    """Keeps the running statistics of ``model`` over steps of ``micro_steps`` each; with one it does nothing."""

    def __init__(self, model: nn.Module, micro_steps: int) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        self._running = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        self._counts = [m.num_batches_tracked for m in norms if m.num_batches_tracked is not None]
        self._micro_steps = micro_steps
        self._done = 0
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """One of the step's forwards happens inside, and its backward, which minds a change of the statistics."""
        if self._micro_steps == 1 or not self._running:
            yield
            return
        with torch.no_grad():
            buffers = self._running + self._counts
            if self._done == 0:
                self._before = [buffer.clone() for buffer in buffers]
                self._sums = [torch.zeros_like(buffer) for buffer in self._running]
            else:
                torch._foreach_copy_(buffers, self._before)
        yield
        with torch.no_grad():
            torch._foreach_add_(self._sums, self._running, alpha=1 / self._micro_steps)
            self._done = (self._done + 1) % self._micro_steps
            if self._done == 0:
                torch._foreach_copy_(self._running, self._sums)
