"""The engine that chooses an engine: it measures the network and a step's course, and predicts what each would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagenet_fast.cost.simulation import Prediction
from imagenet_fast.cost.timing import Timing
from imagenet_fast.sync.collectives import wire_for
from imagenet_fast.sync.engine import Engine, SyncEngine, SyncStats
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.prediction import best_fuse, predict
from imagenet_fast.sync.probing import Network
from imagenet_fast.sync.scheduler import Scheduler
from imagenet_fast.sync.span import Span


@dataclass(frozen=True)
class Candidate:
    """An engine to be predicted."""

    name: str
    engine: Engine
    exact: bool = True
    share: float = 1.0
    """Of the values, which it sends."""
    electable: bool = True
    """Whether it may be chosen; else it is there for comparison."""


class Auto(SyncEngine):
    """Works as ``meanwhile`` for a few steps, then hands the pool to the fastest candidate by the cost model."""

    def __init__(self, pool: GradientPool, meanwhile: Engine, candidates: Sequence[Candidate]) -> None:
        self._pool = pool
        self._wire = wire_for(pool.buffer.dtype, meanwhile.wire, pool.topology)
        self._candidates = candidates
        self._meanwhile = Scheduler(meanwhile, pool)
        self._timetable = pool.watch(layers=any(c.engine.awaits == "read" and c.electable for c in candidates))

    def lay_out(self) -> None:
        self._timetable.close()
        self._meanwhile.lay_out()
        self._timetable = self._pool.watch(self._timetable.layers)

    def push(self, span: Span) -> None:
        self._timetable.push()
        self._meanwhile.push(span)

    def finish(self) -> SyncStats:
        self._timetable.finish()
        stats = self._meanwhile.finish()
        if self._timetable.complete:
            stats.decision = self._decide(self._timetable.timing())
        return stats

    def close(self) -> None:
        self._timetable.close()
        self._meanwhile.close()

    def _decide(self, timing: Timing) -> tuple[Prediction, ...]:
        pool, wire, topology = self._pool, self._wire, self._pool.topology.anew()
        network = Network(topology, wire)
        seconds: list[float] = []
        for candidate in self._candidates:
            fuse = best_fuse(candidate.engine, pool, wire, timing, network)
            seconds.append(predict(candidate.engine, pool, wire, fuse, timing, network, candidate.share))
        fastest = min((s, n) for n, s in enumerate(seconds) if self._candidates[n].electable)[1]
        left = self._meanwhile.state_dict()  # by codes
        chosen = Scheduler(self._candidates[fastest].engine, pool, network, timing)
        pool.attach(chosen)
        chosen.load_state_dict(left)
        topology.close()
        return tuple(
            Prediction(candidate.name, step_s, candidate.exact, number == fastest)
            for number, (candidate, step_s) in enumerate(zip(self._candidates, seconds, strict=True))
        )
