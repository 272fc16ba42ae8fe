"""Lazy all-reduce: neighbouring gradients leave together, as soon as enough of them are ready.

After GradientFlow (arXiv 1902.06855): small messages waste a network on latency, so a finished gradient
waits in the pool until its contiguous run of finished neighbours reaches a threshold; the run then leaves as
one all-reduce while backward goes on. The gradients already lie side by side, so fusing them copies nothing.
"""

from __future__ import annotations

import torch

from imagenet_fast.sync.collectives import Transfer, native, wire_buffer
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.pool import GradientPool, Span


class Lazy(SyncEngine):
    """Fused until ``threshold`` bytes on the wire, overlapped with backward.

    A threshold of 0 sends every tensor by itself, an infinite one sends everything at the end of backward.
    """

    def __init__(self, pool: GradientPool, wire: torch.dtype, threshold: float) -> None:
        self._pool = pool
        self._wire = wire_buffer(pool.buffer, wire)
        self._threshold = threshold
        self._begin = self._end = 0  # elements ready and not yet sent
        self._transfers: list[Transfer] = []

    def push(self, span: Span) -> None:
        self._end = span.stop
        if (self._end - self._begin) * self._wire.element_size() >= self._threshold:
            self._launch()

    def finish(self) -> SyncStats:
        exposed = Stopwatch(self._pool.buffer.device)
        stats = SyncStats(exposed)
        with exposed:
            if self._end > self._begin:
                self._launch()
            for transfer in self._transfers:
                transfer.wait()
                stats.add(transfer)
        self._transfers.clear()
        self._begin = self._end = 0
        return stats

    def _launch(self) -> None:
        run = slice(self._begin, self._end)
        self._transfers.append(native(self._pool.buffer[run], self._wire[run]))
        self._begin = self._end
