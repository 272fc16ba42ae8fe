"""The engine that chooses an engine: it measures the network and some steps, and predicts each engine's step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.messages import Engine
from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.sync.all_reduce import wire_dtype, wire_for
from imagenet_fast.sync.bucket_scheduler import Scheduler, step_model
from imagenet_fast.sync.engine import SyncEngine, SyncStats
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
    build: Callable[[GradientBuffer], SyncEngine] | None = None
    """Function that builds the engine; None if a ``Scheduler`` is enough."""


class Auto:
    """An engine that works as another: as ``meanwhile`` for a few steps, then as the fastest candidate.

    The cost model predicts which one is fastest. That engine is built when the next step begins. It may give the pool
    another layout, which would lose the gradients of a step that is not applied yet.
    """

    def __init__(self, pool: GradientBuffer, meanwhile: Engine, candidates: Sequence[Candidate]) -> None:
        """Start the ``meanwhile`` engine and the timing of steps, from which all ``candidates`` are predicted."""
        self._pool = pool
        probed = pool.topology.anew()  # whose streams end with the choice
        self._network = NetworkProbe(probed, wire_for(pool.values.dtype, wire_dtype(meanwhile.wire), probed))
        self._candidates = candidates
        self._electable = {candidate.name: candidate for candidate in candidates if candidate.electable}
        self._elected: tuple[Candidate, Timing] | None = None  # to be built when the next step begins
        self.chosen = ""
        """The name of the candidate that it works as; empty before the choice."""
        self.now: SyncEngine = Scheduler(meanwhile, pool)
        """The engine that it works as."""
        self._timetable = pool.layer_timer(layers=any(c.engine.awaits == "read" for c in self._electable.values()))

    def __getattr__(self, name: str) -> Any:
        """Return what is not defined here of the engine that it works as."""
        return getattr(self.now, name)

    @property
    def sends_part(self) -> bool:
        """True if its engine, or one that may still be chosen, sends only some elements."""
        return self.now.sends_part or any(candidate.share < 1 for candidate in self._to_come())

    @property
    def is_steady(self) -> bool:
        """True once it has chosen an engine that is."""
        return bool(self.chosen) and self.now.is_steady

    @property
    def has_residual(self) -> bool:
        """True if its engine, or one that may still be chosen, has a residual."""
        return self.now.has_residual or any(not candidate.exact for candidate in self._to_come())

    def rebuild_buckets(self) -> None:
        """Adapt the engine to the pool's new layout, and restart the timing of steps."""
        self.now.rebuild_buckets()
        self._time_again()

    def begin(self) -> None:
        """Become the chosen engine, if there is one.

        That makes process groups, which every rank must do at once: when a step starts, and not in backward, where
        another rank may already wait in a collective of the loop.
        """
        if self._elected is not None:
            (candidate, timing), self._elected = self._elected, None
            left = self.now.state_dict()
            self._become(candidate, timing)
            if left and candidate.build is None:
                self.now.load_state_dict(left | {"learnt": None})
        self.now.begin()

    def gradient_ready(self, slot: ParamSlot) -> None:
        """Note the time, until it is known, and push the slot to the engine."""
        if not self.chosen:
            self._timetable.gradient_ready()
        self.now.gradient_ready(slot)

    def finish(self) -> SyncStats:
        """Finish the step; after the last timed one, choose an engine and report all predictions in ``decision``."""
        if not self.chosen:
            self._timetable.finish()
        stats = self.now.finish()
        if not self.chosen and self._elected is None and self._timetable.complete:
            stats.decision = self._decide(self._timetable.timing())
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the engine, with its name as ``elected`` if it was chosen."""
        return self.now.state_dict() | ({"elected": self.chosen} if self.chosen else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict`` as the engine that had been chosen, or restart the timing of steps.

        Raises:
            ValueError: That engine cannot be chosen here, or another has been.
        """
        rest = dict(state)
        elected = rest.pop("elected", "")
        if elected and elected != self.chosen:
            told = f"this state is of the time after auto had chosen {elected}"
            if self.chosen:
                raise ValueError(f"{told}, and here it has chosen {self.chosen}; load it before the pool's first step")
            if elected not in self._electable:
                raise ValueError(
                    f"{told}, which is not among what it may choose here; give auto the settings that it had"
                )
            self._become(self._electable[elected])
        self.now.load_state_dict(rest)
        self._time_again()

    def close(self) -> None:
        """Wait for all messages, and end the streams on which the network was measured."""
        self.now.close()
        if not self.chosen:
            self._network.topology.close()

    def _time_again(self) -> None:
        """Restart the timing of steps, unless a choice was made."""
        if not self.chosen:
            self._timetable = self._pool.layer_timer(self._timetable.layers)

    def _to_come(self) -> Iterable[Candidate]:
        """Return the candidates that may still be chosen."""
        return () if self.chosen else self._electable.values()

    def _become(self, candidate: Candidate, timing: Timing | None = None) -> None:
        """Work as the candidate from now on."""
        self._timetable.close()
        self._elected, self.chosen, before = None, candidate.name, self.now
        if candidate.build is not None:
            self.now = candidate.build(self._pool)
        else:
            self.now = Scheduler(candidate.engine, self._pool, self._network, timing)
        before.close()
        self._network.topology.close()
        self._network.topology = self._pool.topology

    def _decide(self, timing: Timing) -> tuple[Prediction, ...]:
        seconds = [step_model(c.engine, self._pool, self._network, c.share).best(timing)[1] for c in self._candidates]
        fastest = min((s, n) for n, s in enumerate(seconds) if self._candidates[n].electable)[1]
        self._elected = self._candidates[fastest], timing
        return tuple(
            Prediction(candidate.name, step_s, candidate.exact, number == fastest)
            for number, (candidate, step_s) in enumerate(zip(self._candidates, seconds, strict=True))
        )
