"""DeAR: reduce-scatter during backward, all-gather during the next forward, together no byte more than an all-reduce.

After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining"
(arXiv 2302.12445). Scatters leave in the order of backward. Gathers follow a few pieces behind, so that the wire is
busy where backward is long; the last of them, for the layers that the next forward reads first, leave in the order
of that forward and overtake the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from imagenet_fast.sync.collectives import SEGMENT_BYTES, wire_for
from imagenet_fast.sync.collectives.pairwise import pairwise_gather, pairwise_scatter
from imagenet_fast.sync.collectives.rounding import split
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane, Peers, Transfer
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span

_BEHIND = 8  # pieces between a scatter and the gather that is started with it


@dataclass
class _Bucket:
    """Neighbouring spans that travel together, in pieces."""

    spans: list[Span]
    scatters: list[Transfer] = field(default_factory=list)
    gathers: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """One segment of a bucket: in ``parts``, one a rank, once it has been scattered."""

    bucket: _Bucket
    target: Tensor
    parts: list[Tensor]
    scattered: Transfer


class Dear(SyncEngine):
    """Pairwise all-reduces cut in two, in buckets of ``bucket`` bytes on the wire."""

    defers = True

    def __init__(self, pool: GradientPool, wire: torch.dtype, bucket: float) -> None:
        self._pool = pool
        self._bucket_bytes = bucket
        device = pool.buffer.device
        self._scatter, self._gather, self._urgent = Lane(device), Lane(device), Lane(device, own=True)
        self._wire = wire_for(pool.buffer, wire, self._scatter)
        self._ready: list[Span] = []
        self._scattered: deque[_Piece] = deque()  # whose gather has not begun
        self._travelling: dict[Span, _Bucket] = {}
        self._stats = SyncStats(Stopwatch(device))

    def push(self, span: Span) -> None:
        self._ready.append(span)
        if (span.stop - self._ready[0].start) * self._wire.itemsize >= self._bucket_bytes:
            self._launch()

    def finish(self) -> SyncStats:
        if self._ready:
            self._launch()
        while self._scattered:
            self._start_gather(self._scattered.pop(), self._urgent)
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._pool.buffer.device))
        return stats

    def wait(self, span: Span) -> None:
        bucket = self._travelling.get(span)
        if bucket is None:  # came with another span
            return
        assert self._stats.exposed is not None
        with self._stats.exposed:
            for gather in bucket.gathers:
                gather.wait()
        for transfer in (*bucket.scatters, *bucket.gathers):
            self._stats.add(transfer)
        for arrived in bucket.spans:
            del self._travelling[arrived]

    def _launch(self) -> None:
        bucket = _Bucket(self._ready)
        self._travelling |= dict.fromkeys(bucket.spans, bucket)
        values = self._pool.buffer[self._ready[0].start : self._ready[-1].stop]
        for target in values.split(SEGMENT_BYTES // self._wire.itemsize):
            parts = split(target.float(), len(self._scatter.ranks))
            scatter = self._scatter.start(partial(pairwise_scatter, parts, self._wire))
            bucket.scatters.append(scatter)
            self._scattered.append(_Piece(bucket, target, parts, scatter))
            if len(self._scattered) > _BEHIND:
                self._start_gather(self._scattered.popleft(), self._gather)
        self._ready = []

    def _start_gather(self, piece: _Piece, lane: Lane) -> None:
        def carry(peers: Peers) -> None:
            piece.scattered.wait()
            pairwise_gather(piece.parts, self._wire, peers)
            if piece.target.dtype != piece.parts[0].dtype:
                piece.target.copy_(torch.cat(piece.parts))

        piece.bucket.gathers.append(lane.start(carry))
