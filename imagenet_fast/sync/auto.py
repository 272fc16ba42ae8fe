"""The engine that chooses an engine: it measures the network and some steps, and predicts each engine's step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.sync.all_reduce import wire_for
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.bucketing import step_model
from imagenet_fast.sync.engine import Engine, SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot


@dataclass(frozen=True)
class Candidate:
    """An engine whose step time is predicted without building it."""

    name: str
    engine: Engine
    """Its declaration; for an engine that is more than a declaration, the one that the cost model uses for it."""
    exact: bool = True
    share: float = 1.0
    """Share of the values that it sends."""
    electable: bool = True
    """True if it may be chosen; otherwise it is only there for comparison."""
    sends_part: bool = False
    build: Callable[[GradientBuffer], SyncEngine] | None = None
    """Function that builds the engine; None if a ``Scheduler`` is enough."""


class Auto(SyncEngine):
    """An engine that works as ``meanwhile`` for a few steps, then hands the pool to the fastest candidate.

    The cost model predicts which one is fastest. That engine is built just before the next step's first gradient is
    taken into the pool. It may give the pool another layout, which would lose the gradients of a step that is not
    applied yet.
    """

    def __init__(self, pool: GradientBuffer, meanwhile: Engine, candidates: Sequence[Candidate]) -> None:
        """Start the ``meanwhile`` engine and the timing of steps.

        Args:
            pool: The pool to work on.
            meanwhile: The engine used until one is chosen.
            candidates: The engines to predict. Only those that are ``electable`` may be chosen.
        """
        self._pool = pool
        self._topology = pool.topology.anew()
        self._network = NetworkProbe(self._topology, wire_for(pool.values.dtype, meanwhile.wire, pool.topology))
        self._candidates = candidates
        self.candidates = [candidate.name for candidate in candidates if candidate.electable]
        self._meanwhile = Scheduler(meanwhile, pool)
        self._timetable = pool.layer_timer(layers=any(c.engine.awaits == "read" and c.electable for c in candidates))
        self._elected: tuple[Candidate, Timing] | None = None
        self.sends_part = any(c.sends_part and c.electable for c in candidates)

    def rebuild_buckets(self) -> None:
        """Adapt the ``meanwhile`` engine to the pool's new layout, and restart the timing of steps."""
        self._timetable.close()
        self._meanwhile.rebuild_buckets()
        self._timetable = self._pool.layer_timer(self._timetable.layers)

    def hand_over(self) -> None:
        """Hand the pool to the chosen engine, if there is one.

        That makes process groups, which every rank must do at once: when a step starts, and not in backward, where
        another rank may already wait in a collective of the loop.
        """
        if self._elected is None:
            return
        candidate, timing = self._elected
        left = self._meanwhile.state_dict()
        engine = self._give(candidate, timing)
        if left and candidate.build is None:
            engine.load_state_dict(left | {"learnt": None})
        engine.begin()

    begin = hand_over  # for loops that start a step without pool.zero_grad

    def select(self, name: str) -> None:
        """Hand the pool to the candidate ``name``, which has been chosen before."""
        self._give(next(candidate for candidate in self._candidates if candidate.name == name))

    def _give(self, candidate: Candidate, timing: Timing | None = None) -> SyncEngine:
        if candidate.build is not None:
            engine = candidate.build(self._pool)
        else:
            engine = Scheduler(candidate.engine, self._pool, self._network, timing)
        engine.selected = candidate.name
        self._pool.attach(engine)
        return engine

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the ``meanwhile`` engine."""
        return self._meanwhile.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``, and restart the timing of steps."""
        self._meanwhile.load_state_dict(state)
        self.rebuild_buckets()

    def gradient_ready(self, slot: ParamSlot) -> None:
        """Note the time, and push the slot to the ``meanwhile`` engine."""
        self._timetable.gradient_ready()
        self._meanwhile.gradient_ready(slot)

    @property
    def has_residual(self) -> bool:
        """True if the ``meanwhile`` engine or one that may be chosen has a residual."""
        return self._meanwhile.has_residual or any(not c.exact and c.electable for c in self._candidates)

    def finish(self) -> SyncStats:
        """Finish the step; after the last timed one, choose an engine and report all predictions in ``decision``."""
        self._timetable.finish()
        stats = self._meanwhile.finish()
        if self._timetable.complete and self._elected is None:
            stats.decision = self._decide(self._timetable.timing())
        return stats

    def close(self) -> None:
        """Stop the timing, and release the ``meanwhile`` engine between steps."""
        self._timetable.close()
        self._meanwhile.close()
        self._topology.close()

    def drop(self) -> None:
        """Stop the timing, and release the ``meanwhile`` engine in the middle of a step."""
        self._timetable.close()
        self._meanwhile.drop()
        self._topology.drop()

    def _decide(self, timing: Timing) -> tuple[Prediction, ...]:
        pool = self._pool
        seconds = [
            step_model(
                c.engine, pool, wire_for(pool.values.dtype, c.engine.wire, pool.topology), self._network, c.share
            ).best(timing)[1]
            for c in self._candidates
        ]
        fastest = min((s, n) for n, s in enumerate(seconds) if self._candidates[n].electable)[1]
        self._elected = self._candidates[fastest], timing
        return tuple(
            Prediction(candidate.name, step_s, candidate.exact, number == fastest)
            for number, (candidate, step_s) in enumerate(zip(self._candidates, seconds, strict=True))
        )
