"""Lazy all-reduce: neighbouring gradients leave together, as soon as enough of them are ready.

After GradientFlow (arXiv 1902.06855): small messages waste a network on latency, so a finished gradient
waits in the pool until its contiguous run of finished neighbours reaches a threshold; the run then leaves as
one all-reduce while backward goes on. The gradients already lie side by side, so fusing them copies nothing.
"""

from __future__ import annotations

import torch

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce, usual_collective, wire_for
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane, Transfer
from imagenet_fast.sync.link import measure_link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.prediction import THRESHOLDS, best_threshold
from imagenet_fast.sync.span import Span, label_of
from imagenet_fast.sync.timetable import Timetable


class Lazy(SyncEngine):
    """Fused until ``threshold`` bytes on the wire, overlapped with backward.

    A threshold of 0 sends every tensor by itself, an infinite one sends everything at the end of backward. None: the
    best for the network and for the course of a step, both of which are measured in the first steps. No collective: the
    usual one.
    """

    def __init__(
        self, pool: GradientPool, wire: torch.dtype, threshold: float | None, collective: Collective | None
    ) -> None:
        self._pool = pool
        self._lane = Lane(pool.buffer.device)
        self._collective = collective or usual_collective(pool.buffer, wire, self._lane)
        self._wire = wire_for(pool.buffer, wire, self._lane)
        self._timetable = None if threshold is not None else Timetable(pool.model, pool.spans, pool.buffer.device)
        self._threshold = THRESHOLDS[0] if threshold is None else threshold
        self._ready: list[Span] = []  # and not yet sent
        self._transfers: list[tuple[str, Transfer]] = []

    def push(self, span: Span) -> None:
        if self._timetable is not None:
            self._timetable.push()
        self._ready.append(span)
        if (span.stop - self._ready[0].start) * self._wire.itemsize >= self._threshold:
            self._launch()

    def finish(self) -> SyncStats:
        if self._timetable is not None:
            self._timetable.finish()
        exposed = Stopwatch(self._pool.buffer.device)
        stats = SyncStats(exposed)
        if self._ready:
            self._launch()
        for label, transfer in self._transfers:
            with exposed(label):
                transfer.wait()
            stats.add(label, transfer)
        self._transfers.clear()
        if self._timetable is not None and self._timetable.complete:
            self._choose_threshold(self._timetable)
        return stats

    def _launch(self) -> None:
        gradients = self._pool.buffer[self._ready[0].start : self._ready[-1].stop]
        transfer = all_reduce(gradients, self._wire, self._collective, self._lane)
        self._transfers.append((label_of(self._ready), transfer))
        self._ready.clear()

    def _choose_threshold(self, timetable: Timetable) -> None:
        link = measure_link(self._collective, self._wire, self._lane, self._pool.buffer.device)
        messages = [float((span.stop - span.start) * self._wire.itemsize) for span in self._pool.spans]
        self._threshold = best_threshold(messages, timetable.timing(), link)
        self._timetable = None
