"""Lazy all-reduce: neighbouring gradients leave together, as soon as enough of them are ready.

After GradientFlow (arXiv 1902.06855): small messages waste a network on latency, so a finished gradient
waits in the pool until its contiguous run of finished neighbours reaches a threshold; the run then leaves as
one all-reduce while backward goes on. The gradients already lie side by side, so fusing them copies nothing.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe import Collective
from imagenet_fast.sync.collectives import all_reduce
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane, Transfer
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


class Lazy(SyncEngine):
    """Fused until ``threshold`` bytes on the wire, overlapped with backward.

    A threshold of 0 sends every tensor by itself, an infinite one sends everything at the end of backward.
    """

    def __init__(self, pool: GradientPool, wire: torch.dtype, threshold: float, collective: Collective) -> None:
        self._pool = pool
        self._wire = wire
        self._threshold = threshold
        self._collective = collective
        self._lane = Lane(pool.buffer.device)
        self._begin = self._end = 0  # elements ready and not yet sent
        self._transfers: list[Transfer] = []

    def push(self, span: Span) -> None:
        self._end = span.stop
        if (self._end - self._begin) * self._wire.itemsize >= self._threshold:
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
        run = self._pool.buffer[self._begin : self._end]
        self._transfers.append(all_reduce(run, self._wire, self._collective, self._lane))
        self._begin = self._end
