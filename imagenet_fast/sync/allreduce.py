"""The naive system: one all-reduce a layer, after backward, each waited for before the next begins."""

from __future__ import annotations

from itertools import groupby

import torch

from imagenet_fast.sync.collectives import native, wire_buffer
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.pool import GradientPool, Span


class AllReduce(SyncEngine):
    """No fusion and no overlap: the floor that the other engines are measured from."""

    def __init__(self, pool: GradientPool, wire: torch.dtype) -> None:
        self._pool = pool
        self._wire = wire_buffer(pool.buffer, wire)

    def push(self, span: Span) -> None:
        """Nothing leaves before the end of backward."""

    def finish(self) -> SyncStats:
        exposed = Stopwatch(self._pool.buffer.device)
        stats = SyncStats(exposed)
        with exposed:
            for _, spans in groupby(self._pool.spans, key=_layer):
                first, *others = spans
                part = slice(first.start, (others or [first])[-1].stop)
                transfer = native(self._pool.buffer[part], self._wire[part])
                transfer.wait()
                stats.add(transfer)
        return stats


def _layer(span: Span) -> str:
    """The module a parameter belongs to, whose weight and bias lie side by side in the pool."""
    return span.name.rpartition(".")[0]
