"""Keep batch-norm running statistics correct over a step of several micro-batches.

Norms update their running statistics at every forward. So four micro-steps of one rank would move them four times as
far as one step of four ranks. Here they move as if each micro-step were a rank of its own, whose statistics are
averaged before an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StepStatistics:
    """Running statistics of ``model`` over steps of several micro-steps.

    Every micro-step starts from the statistics at the beginning of the step, and the results are averaged. A step that
    is skipped leaves no trace: where a layer overflows in fp16, a running mean would be infinite for good.
    """

    def __init__(self, model: nn.Module, micro_steps: int, skips: bool = False) -> None:
        """Find the running statistics of ``model``.

        Args:
            model: The model.
            micro_steps: Micro-steps of a step.
            skips: Whether steps may be skipped; it costs a copy of the statistics in every step.
        """
        norms = _norms(model)
        self._running = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        self._counts = [m.num_batches_tracked for m in norms if m.num_batches_tracked is not None]
        self._micro_steps = micro_steps
        self._done = 0
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._undone = [buffers for buffers in (self._running, self._counts) if buffers and skips]
        self._at_begin: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step, and undo what a step that was cut off before its last micro-step did to the statistics."""
        if self._before:
            torch._foreach_copy_(self._running + self._counts, self._before)
        self._before, self._done = [], 0
        self._at_begin = [_flat(buffers) for buffers in self._undone]

    @torch.no_grad()
    def end(self, found_inf: Tensor | None) -> None:
        """End a step: put back the statistics of its beginning if ``found_inf`` is 1. The host does not wait for it."""
        if found_inf is None:
            return
        for buffers, before in zip(self._undone, self._at_begin, strict=True):
            kept = torch.where(found_inf > 0, before, _flat(buffers))
            parts = kept.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Run one micro-step's forward and backward inside this context.

        The backward belongs inside because it fails if the statistics change after its forward.
        """
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
                self._before = []


class PipelinedStatistics:
    """Running statistics of ``layers`` where forwards and backwards of a step's micro-batches alternate.

    A backward fails if the statistics were restored after its forward, so each forward moves them on, but by less.
    Norms with momentum None take the mean over all batches so far. Their momentum is 1 over the number of batches,
    which is read when a step begins.
    """

    def __init__(self, layers: Iterable[nn.Module], micro_batches: int) -> None:
        """Find the running statistics of ``layers``, for steps of ``micro_batches`` each."""
        self._norms = [norm for layer in layers for norm in _norms(layer)]
        self._momenta = [norm.momentum for norm in self._norms]
        self._buffers = [
            b for n in self._norms for b in (n.running_mean, n.running_var, n.num_batches_tracked) if b is not None
        ]
        self._micro_batches = micro_batches
        self._moving = self._momenta  # in the current step
        self._before: list[Tensor] = []
        self._done = 0

    def begin(self) -> None:
        """Begin a step, and undo what a step that was cut off before its last micro-batch did to the statistics."""
        if self._before:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._before)
        self._before, self._done = [], 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run one micro-batch's forward inside this context."""
        if self._micro_batches == 1 or not self._buffers:
            yield
            return
        if not self._before:
            self._before = [buffer.clone() for buffer in self._buffers]
            self._moving = [_of_batch(*pair) for pair in zip(self._norms, self._momenta, strict=True)]
        for norm, momentum in zip(self._norms, self._moving, strict=True):
            if momentum is not None:
                norm.momentum = _micro_momentum(momentum, self._micro_batches, self._done)
        try:
            yield
        finally:
            for norm, momentum in zip(self._norms, self._momenta, strict=True):
                norm.momentum = momentum
        self._done += 1
        if self._done == self._micro_batches:  # all micro-batches together count as one batch
            self._before = []
            moved = [n.num_batches_tracked for n in self._norms if n.training and n.num_batches_tracked is not None]
            if moved:
                torch._foreach_sub_(moved, self._micro_batches - 1)


def _of_batch(norm: nn.modules.batchnorm._NormBase, momentum: float | None) -> float | None:
    """Return the momentum with which a whole batch moves the statistics of ``norm``."""
    if momentum is None and norm.training and norm.num_batches_tracked is not None:
        return 1 / (int(norm.num_batches_tracked) + 1)  # else every forward would read it from the device
    return momentum


def _micro_momentum(momentum: float, micro_batches: int, number: int) -> float:
    """Return the momentum of a batch's micro-batch ``number``, so that all count alike and together move the norm once.

    The rule is r <- (1 - a) r + a mean(s), applied for one s after the other; each update shrinks the earlier ones.
    """
    each = momentum / micro_batches
    return each / (1 - (micro_batches - 1 - number) * each)


def _flat(buffers: list[Tensor]) -> Tensor:
    """Return a copy of all values in one tensor, since a few large copies are faster than many small ones."""
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
