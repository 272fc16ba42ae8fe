"""A pool's step in a CUDA graph, and what is done beside the graph at each replay.

Where the engine does not defer, the graph holds all of a step. An engine that defers has messages under way at the end
of a step, and a graph must not leave any: so the graph holds the update of the step before, layer by layer in its
forward, and then backward. It records when messages are ready and waits for their arrival, by events that live outside
of it; the messages are launched beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from imagenet_fast.sync.gradient_step import GradientStep
from imagenet_fast.sync.pending import PendingUpdate
from imagenet_fast.sync.pool import GradientPool


class CapturedStep:
    """A step that is captured in a CUDA graph, and then taken by its replays.

    To Python a replayed step is as a launched one: parameters are pending, and may be read, saved and evaluated. Only
    ``p.grad`` is not theirs.
    """

    def __init__(self, pool: GradientPool) -> None:
        """Prepare to capture a step of ``pool``."""
        self._pool = pool
        self._step = pool.current  # once captured, that one, with the tensors that replays fill
        self._update: PendingUpdate | None = None  # what is left to the next step, if the engine defers
        self._inputs: list[Tensor] = []  # what the graph's own update reads, of the step before

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the step that the block takes; one that is left by an exception has not been."""
        pool, before = self._pool, self._pool.pending
        try:
            with pool.engine.capture():
                self._inputs = [] if before is None else before.inputs
                yield
                self._step = pool.current
        except BaseException:
            if pool.engine.defers and before is not None and pool.pending is not None:
                pool.pending = before.again(pool.pending)
            pool.current = GradientStep(pool)
            raise

    def begin(self) -> None:
        """Begin the step, in the graph: its stream is that of the update of the step before."""
        if self._pool.engine.defers and self._pool.pending is not None:
            self._pool.pending.stream = torch.cuda.current_stream()

    def end(self) -> None:
        """End the step, in the graph: what it leaves is what the next replay finds."""
        if self._pool.engine.defers and (update := self._pool.pending) is not None:
            self._update = update
            torch._foreach_copy_(self._inputs, update.inputs)

    def prepare(self) -> None:
        """Hand over what a launched step, or one of another graph, has left; before each replay."""
        pending = self._pool.pending
        if self._update is not None and pending is not None and pending is not self._update:
            torch._foreach_copy_(self._inputs, pending.inputs)

    def replayed(self) -> None:
        """Count a replay, and do what the graph leaves out."""
        pool = self._pool
        pool.current = self._step
        if self._update is not None and pool.pending is not None:
            if pool.pending is not self._update or not self._update.is_whole:
                self._update = pool.pending = self._update.again(pool.pending)
            self._update.stream = torch.cuda.current_stream()
        pool.engine.replayed()
        increment_version(pool.parameters)
