"""The engine that chooses an engine: it measures the network and a step's course, and predicts what each would take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from imagenet_fast.recipe.engines import (
    AllReduceSync,
    Collective,
    DearSync,
    HybridSync,
    LazySync,
    RingSync,
    SparseSync,
    Wire,
)
from imagenet_fast.sync.collectives import usual_collective
from imagenet_fast.sync.deferred import Deferred
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane
from imagenet_fast.sync.lazy import Lazy
from imagenet_fast.sync.link import Link, measure_link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.prediction import Prediction, best_threshold, fused_step, layerwise_step
from imagenet_fast.sync.span import Span
from imagenet_fast.sync.timetable import Timetable, Timing

Candidate = AllReduceSync | RingSync | LazySync | HybridSync | DearSync
_MiB = 2**20


class Auto(SyncEngine):
    """Works as ``lazy`` for a few steps, then hands the pool to the fastest exact engine by the cost model."""

    def __init__(
        self, pool: GradientPool, wire: Wire, dtype: torch.dtype, defer: bool, build: Callable[[Candidate], SyncEngine]
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._dtype = dtype
        self._defer = defer
        self._build = build
        self._lane = Lane(pool.buffer.device)
        self._usual = usual_collective(pool.buffer, dtype, self._lane)
        self._meanwhile = Lazy(pool, dtype, _MiB, self._usual)
        self._timetable = Timetable(pool.model, pool.spans, pool.buffer.device)

    def push(self, span: Span) -> None:
        self._timetable.push()
        self._meanwhile.push(span)

    def finish(self) -> SyncStats:
        self._timetable.finish()
        stats = self._meanwhile.finish()
        if self._timetable.complete:
            stats.decision = self._decide(self._timetable.timing())
        return stats

    def _decide(self, timing: Timing) -> tuple[Prediction, ...]:
        collectives: tuple[Collective, ...] = ("native", "ring", "pairwise")
        links = {c: measure_link(c, self._dtype, self._lane, self._pool.buffer.device) for c in collectives}
        usual = links[self._usual]
        spans, itemsize = self._pool.spans, self._dtype.itemsize
        messages = [float((span.stop - span.start) * itemsize) for span in spans]
        threshold = best_threshold(messages, timing, usual)
        ring, sparse = RingSync(wire=self._wire), SparseSync()
        lazy = LazySync(wire=self._wire, threshold_mb=threshold / _MiB)
        engines: dict[Candidate, SyncEngine] = {}
        seconds: dict[Candidate, float] = {
            AllReduceSync(wire=self._wire): layerwise_step(spans, itemsize, timing, links["native"]),
            ring: fused_step(messages, timing, ring.bucket_mb * _MiB, links["ring"]),
            lazy: fused_step(messages, timing, threshold, usual),
        }
        for settings in (HybridSync(wire=self._wire), DearSync(wire=self._wire)) if self._defer else ():
            engine = engines[settings] = self._build(settings)
            assert isinstance(engine, Deferred)
            link: Link = links["ring" if isinstance(settings, HybridSync) else "pairwise"]
            seconds[settings] = engine.predict(timing, link)
            engine.plan(timing, link)
        best = min(seconds, key=seconds.__getitem__)
        self._pool.attach(engines.get(best) or self._build(best))
        sent = [message * (1 - sparse.sparsity) for message in messages]
        narrowing = itemsize / self._pool.buffer.element_size()  # DDP counts its buckets' bytes before the hook's cast
        ddp_s = fused_step(messages, timing, 25 * _MiB * narrowing, links["native"], first=_MiB * narrowing)
        return (
            *(Prediction(settings.kind, step_s, True, settings is best) for settings, step_s in seconds.items()),
            Prediction("sparse", fused_step(sent, timing, sparse.threshold_mb * _MiB, usual), False, False),
            Prediction("ddp", ddp_s, True, False),
        )
