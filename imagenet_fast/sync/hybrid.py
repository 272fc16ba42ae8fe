"""Hybrid all-reduce: each layer by the collective that suits it, overlapped with backward and with the next forward.

After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191): convolutional layers are small, bound by
latency and needed first in the next forward; fully connected ones are large, bound by bandwidth and needed last.
The former go through a butterfly, the latter through a ring, and a layer is waited for just before it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from imagenet_fast.recipe import Collective
from imagenet_fast.sync.collectives import all_reduce
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane, Transfer
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span

Policy = Callable[[Span], Collective]


@dataclass
class _Run:
    """Neighbouring spans that travel together."""

    spans: list[Span]
    transfer: Transfer


class Hybrid(SyncEngine):
    """Neighbouring layers of one collective leave together, once they come to ``fuse`` bytes on the wire.

    Butterflies have connections of their own (on a GPU: a stream and a communicator), so that they overtake what
    is queued for the rings. Nothing is waited for at the end of backward.
    """

    defers = True

    def __init__(self, pool: GradientPool, wire: torch.dtype, policy: Policy, fuse: float) -> None:
        self._pool = pool
        self._wire = wire
        self._policy = policy
        self._fuse = fuse
        device = pool.buffer.device
        self._urgent, self._bulk = Lane(device, own=True), Lane(device)
        self._ready: list[Span] = []  # and not yet sent
        self._travelling: dict[Span, _Run] = {}
        self._stats = SyncStats(Stopwatch(device))

    def push(self, span: Span) -> None:
        if self._ready and self._policy(span) != self._policy(self._ready[0]):
            self._launch()
        self._ready.append(span)
        if (span.stop - self._ready[0].start) * self._wire.itemsize >= self._fuse:
            self._launch()

    def finish(self) -> SyncStats:
        if self._ready:
            self._launch()
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._pool.buffer.device))
        return stats

    def wait(self, span: Span) -> None:
        run = self._travelling.get(span)
        if run is None:  # came with another span
            return
        assert self._stats.exposed is not None
        with self._stats.exposed:
            run.transfer.wait()
        self._stats.add(run.transfer)
        for arrived in run.spans:
            del self._travelling[arrived]

    def _launch(self) -> None:
        collective = self._policy(self._ready[0])
        lane = self._urgent if collective == "butterfly" else self._bulk
        values = self._pool.buffer[self._ready[0].start : self._ready[-1].stop]
        run = _Run(self._ready, all_reduce(values, self._wire, collective, lane))
        self._travelling |= dict.fromkeys(run.spans, run)
        self._ready = []


def by_type(span: Span) -> Collective:
    """The thesis' rule: butterfly for convolutions and norm layers, ring for fully connected layers, whose weight
    is a matrix."""
    return "ring" if any(p.dim() == 2 for p in span.module.parameters(recurse=False)) else "butterfly"
