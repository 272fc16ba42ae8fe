"""The naive system: one all-reduce a layer, after backward, each waited for before the next begins."""

from __future__ import annotations

from itertools import groupby

import torch

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


class AllReduce(SyncEngine):
    """No fusion and no overlap: the floor that the other engines are measured from."""

    def __init__(self, pool: GradientPool, wire: torch.dtype, collective: Collective) -> None:
        self._pool = pool
        self._wire = wire
        self._collective = collective
        self._lane = Lane(pool.buffer.device)

    def push(self, span: Span) -> None:
        """Nothing leaves before the end of backward."""

    def finish(self) -> SyncStats:
        exposed = Stopwatch(self._pool.buffer.device)
        stats = SyncStats(exposed)
        for layer, spans in groupby(self._pool.spans, key=lambda span: span.layer):
            first, *others = spans
            gradients = self._pool.buffer[first.start : (others or [first])[-1].stop]
            with exposed(layer):
                transfer = all_reduce(gradients, self._wire, self._collective, self._lane)
                transfer.wait()
            stats.add(layer, transfer)
        return stats
