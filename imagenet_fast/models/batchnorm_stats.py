"""Keep batch-norm running statistics correct over a step of several micro-steps.

Norms update their running statistics at every forward. So four micro-steps of one rank would move them four times as
far as one step of four ranks. Here they move as if each micro-step were a rank of its own, whose statistics are
averaged before an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StepStatistics:
    """Running statistics of ``model`` over steps of several micro-steps.

    Every micro-step's forward starts from the statistics at the beginning of the step, and the results are averaged. A
    step that is skipped leaves no trace: where a layer overflows in fp16, a running mean would be infinite for good.
    """

    def __init__(self, model: nn.Module, micro_steps: int, skips: bool = False) -> None:
        """Find the norms of ``model``.

        Args:
            model: The model.
            micro_steps: Micro-steps of a step, or micro-batches of a pipeline.
            skips: Whether steps may be skipped; it costs a copy of the statistics in every step.
        """
        self._norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        self._micro_steps = micro_steps
        self._undoes = skips or micro_steps > 1
        self._done = micro_steps
        self._running: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._bytes: list[Tensor] = []
        """Memory of the running statistics and of the counts of batches."""
        self._before = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Begin a step, and undo what a step that was cut off before its last micro-step did to the statistics."""
        if self._done < self._micro_steps:
            self._put_back(self._before)
        self._done = 0
        norms = [norm for norm in self._norms if norm.training and self._undoes]
        found = [b for norm in norms for b in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]
        # By .data no graph is made, and a later backward does not miss old values, which it reads of frozen norms only.
        buffers = [buffer.data for buffer in found if buffer is not None]
        self._running = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._sums = [torch.zeros_like(buffer) for buffer in self._running] if self._micro_steps > 1 else []
        self._bytes = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]
        if self._bytes:
            self._before = torch.cat(self._bytes)  # since one large copy is faster than many small ones

    def end(self, found_inf: Tensor | None) -> None:
        """End a step: put back the statistics of its beginning if ``found_inf`` is 1. The host does not wait for it."""
        if found_inf is not None and self._bytes:
            self._put_back(torch.where(found_inf > 0, self._before, torch.cat(self._bytes)))

    def forget(self) -> None:
        """Undo nothing of a step that was cut off."""
        self._done = self._micro_steps

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Run one micro-step's forward inside this context; its backward may follow when others have run."""
        if self._done and self._sums:
            self._put_back(self._before)
        yield
        self._done += 1
        if self._sums:
            torch._foreach_add_(self._sums, self._running, alpha=1 / self._micro_steps)
            if self._done == self._micro_steps:
                torch._foreach_copy_(self._running, self._sums)

    def _put_back(self, statistics: Tensor) -> None:
        if self._bytes:
            torch._foreach_copy_(self._bytes, statistics.split([one.numel() for one in self._bytes]))
