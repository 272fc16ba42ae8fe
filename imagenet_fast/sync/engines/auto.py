"""The engine that chooses an engine: it measures the network and a step's course, and predicts what each would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.cost_model.timing import Timing
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.collectives import wire_for
from imagenet_fast.sync.engine import Engine, SyncEngine, SyncStats
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.step_prediction import predict_best


@dataclass(frozen=True)
class Candidate:
    """An engine to be predicted, which is not built for it."""

    name: str
    engine: Engine
    """What it declares; of one that is more than that, what the cost model takes it for."""
    exact: bool = True
    share: float = 1.0
    """Of the values, which it sends."""
    electable: bool = True
    """Whether it may be chosen; else it is there for comparison."""
    leaves_behind: bool = False
    build: Callable[[GradientPool], SyncEngine] | None = None
    """How it is made where a scheduler would not do."""


class Auto(SyncEngine):
    """Works as ``meanwhile`` for a few steps, then hands the pool to the fastest candidate by the cost model.

    That one is built when the next step's first gradient comes: it may give the pool another layout, in which the
    gradients of a step that has yet to be applied would be lost.
    """

    def __init__(self, pool: GradientPool, meanwhile: Engine, candidates: Sequence[Candidate]) -> None:
        self._pool = pool
        self._topology = pool.topology.anew()
        self._network = NetworkProbe(self._topology, wire_for(pool.buffer.dtype, meanwhile.wire, pool.topology))
        self._candidates = candidates
        self.candidates = [candidate.name for candidate in candidates if candidate.electable]
        self._meanwhile = Scheduler(meanwhile, pool)
        self._timetable = pool.watch(layers=any(c.engine.awaits == "read" and c.electable for c in candidates))
        self._elected: tuple[Candidate, Timing] | None = None
        self.leaves_behind = any(c.leaves_behind and c.electable for c in candidates)

    def lay_out(self) -> None:
        self._timetable.close()
        self._meanwhile.lay_out()
        self._timetable = self._pool.watch(self._timetable.layers)

    def begin(self) -> None:
        if self._elected is None:
            return
        candidate, timing = self._elected
        left = self._meanwhile.state_dict()
        engine = self._hand_over(candidate, timing)
        if left and candidate.build is None:
            engine.load_state_dict(left | {"learnt": None})
        engine.begin()

    def elect(self, name: str) -> None:
        """Hand the pool to that candidate, which has been chosen before."""
        self._hand_over(next(candidate for candidate in self._candidates if candidate.name == name))

    def _hand_over(self, candidate: Candidate, timing: Timing | None = None) -> SyncEngine:
        if candidate.build is not None:
            engine = candidate.build(self._pool)
        else:
            engine = Scheduler(candidate.engine, self._pool, self._network, timing)
        engine.elected = candidate.name
        self._pool.attach(engine)
        return engine

    def state_dict(self) -> dict[str, Any]:
        return self._meanwhile.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meanwhile.load_state_dict(state)
        self.lay_out()

    def push(self, span: ParamSlot) -> None:
        self._timetable.push()
        self._meanwhile.push(span)

    @property
    def has_residual(self) -> bool:
        return self._meanwhile.has_residual

    def scale_residual(self, ratio: Tensor) -> None:
        self._meanwhile.scale_residual(ratio)

    def finish(self, drop: bool = False) -> SyncStats:
        self._timetable.finish()
        stats = self._meanwhile.finish(drop)
        if self._timetable.complete and self._elected is None:
            stats.decision = self._decide(self._timetable.timing())
        return stats

    def close(self) -> None:
        self._timetable.close()
        self._meanwhile.close()
        self._topology.close()

    def drop(self) -> None:
        self._timetable.close()
        self._meanwhile.drop()
        self._topology.drop()

    def _decide(self, timing: Timing) -> tuple[Prediction, ...]:
        pool = self._pool
        seconds = [
            predict_best(c.engine, pool, wire_for(pool.buffer.dtype, c.engine.wire, pool.topology), timing,
                         self._network, c.share)[1]
            for c in self._candidates
        ]  # fmt: skip
        fastest = min((s, n) for n, s in enumerate(seconds) if self._candidates[n].electable)[1]
        self._elected = self._candidates[fastest], timing
        return tuple(
            Prediction(candidate.name, step_s, candidate.exact, number == fastest)
            for number, (candidate, step_s) in enumerate(zip(self._candidates, seconds, strict=True))
        )
