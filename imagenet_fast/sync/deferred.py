"""Synchronisation that overlaps backward and the next forward: a layer is waited for just before it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from imagenet_fast.sync.agenda import Agenda, Task
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Transfer, together
from imagenet_fast.sync.link import Link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


@dataclass(frozen=True)
class Stage:
    """One of the transfers that, one after another, synchronise a piece of the pool."""

    share: float
    """Of the piece's bytes, in units of a whole all-reduce."""
    start: Callable[[], Transfer]


@dataclass
class _Run:
    """Neighbouring spans that travel together."""

    spans: list[Span]
    transfers: list[Transfer] = field(default_factory=list)


class Deferred(SyncEngine):
    """Neighbouring spans of one ``kind`` leave together, once they come to ``fuse`` bytes on the wire.

    ``stages`` says how the values of such a run, which ends with a given span, are sent: pieces of the pool, and what
    happens to each. The order of
    all pieces, the most urgently needed first, is an :class:`Agenda`'s, for which ``measure`` times the network.
    """

    defers = True

    def __init__(
        self,
        pool: GradientPool,
        wire: torch.dtype,
        fuse: float,
        kind: Callable[[Span], Hashable],
        stages: Callable[[Tensor, Span], Iterable[tuple[Tensor, Sequence[Stage]]]],
        measure: Callable[[], Link],
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._fuse = fuse
        self._kind = kind
        self._stages = stages
        self._measure = measure
        self._agenda = Agenda(len(pool.spans) + 1, pool.buffer.device)
        self._ready: list[Span] = []  # in the run that is growing
        self._travelling: dict[Span, _Run] = {}
        self._stats = SyncStats(Stopwatch(pool.buffer.device))

    def push(self, span: Span) -> None:
        if self._ready and self._kind(span) != self._kind(self._ready[0]):
            self._close_run(span.index)
        self._ready.append(span)
        if (span.stop - self._ready[0].start) * self._wire.itemsize >= self._fuse:
            self._close_run(span.index)
        self._agenda.reach(span.index)

    def finish(self) -> SyncStats:
        last = len(self._pool.spans)
        if self._ready:
            self._close_run(last)
        self._agenda.reach(last)
        if self._agenda.learning:
            for run in self._travelling.values():
                together(run.transfers).wait()
            self._agenda.plan(self._measure())
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._pool.buffer.device))
        return stats

    def wait(self, span: Span) -> None:
        run = self._travelling.get(span)
        if run is None:  # came with another span
            return
        transfer = together(run.transfers)
        assert self._stats.exposed is not None
        with self._stats.exposed:
            transfer.wait()
        self._stats.add(transfer)
        for arrived in run.spans:
            del self._travelling[arrived]

    def _close_run(self, event: int) -> None:
        run = _Run(self._ready)
        values = self._pool.buffer[self._ready[0].start : self._ready[-1].stop]
        needed = -self._ready[-1].index  # the last layers of the pool are the first of the next forward
        for piece, stages in self._stages(values, self._ready[-1]):
            before: int | None = None
            for number, stage in enumerate(stages):
                task = Task(event, stage.share * piece.numel() * self._wire.itemsize, (number, needed), before)
                before = self._agenda.add(task, lambda start=stage.start: run.transfers.append(start()))  # type: ignore[misc]
        self._travelling |= dict.fromkeys(run.spans, run)
        self._ready = []
