"""The engine that chooses an engine: it measures the network and some steps, and predicts each engine's step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagenet_fast.cost_model.declarations import DeclaredSettings, declare
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.cost_model.step_simulator import Prediction
from imagenet_fast.recipe.sync_config import SparseSync
from imagenet_fast.sync.bucket_scheduler import Scheduler, step_model
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.sparse import Sparse


@dataclass(frozen=True)
class Candidate:
    """An engine whose step time is predicted without building it."""

    name: str
    settings: DeclaredSettings
    electable: bool
    """True if it may be chosen; otherwise it is only there for comparison."""


class Auto(Scheduler):
    """An engine that works as ``meanwhile`` for a few steps, and then gives its place to the fastest candidate.

    The cost model predicts which one is fastest. That engine is built when the next step begins. It may give the pool
    another layout, which would lose the gradients of a step that is not applied yet.
    """

    is_steady = False

    def __init__(
        self, buffer: GradientBuffer, meanwhile: Declaration, candidates: Sequence[Candidate], steps_per_epoch: int = 1
    ) -> None:
        """Start the ``meanwhile`` engine and the timing of steps, from which all ``candidates`` are predicted."""
        self._candidates, self._steps_per_epoch = candidates, steps_per_epoch
        self._electable = {candidate.name: candidate for candidate in candidates if candidate.electable}
        self._chosen: tuple[Candidate, Timing] | None = None  # to be built when the next step begins
        super().__init__(meanwhile, buffer)
        self.sends_part = any(candidate.settings.share < 1 for candidate in self._electable.values())
        self._network.topology = buffer.topology.anew()  # whose streams end with the choice

    def begin(self) -> SyncEngine:
        """Return the chosen engine, if there is one.

        That makes process groups, which every rank must do at once: when a step starts, and not in backward, where
        another rank may already wait in a collective of the loop.
        """
        if self._chosen is None:
            return self
        left, engine = self.state_dict(), self._become(*self._chosen)
        if left and isinstance(engine, Scheduler):
            engine.load_state_dict(left | {"learnt": None})
        return engine.begin()

    def go_on_as(self, elected: str) -> SyncEngine:
        """Return the engine that had been chosen, or this one, to load a state.

        Raises:
            ValueError: That engine cannot be chosen here.
        """
        known = self._electable.get(elected)
        return super().go_on_as(elected) if known is None else self._become(known)

    def close(self) -> None:
        """Wait for all messages, and end the streams on which the network was measured."""
        super().close()
        self._network.topology.close()

    def _time_steps(self) -> LayerTimer | None:
        return self._buffer.layer_timer() if self._chosen is None else None

    def _adopt(self, timing: Timing) -> None:
        """Choose an engine, and report all predictions in ``decision``."""
        self._timetable = None
        tried = [candidate.settings for candidate in self._candidates]
        seconds = [step_model(declare(s), self._buffer, self._network, s.share).best(timing)[1] for s in tried]
        fastest = min((s, n) for n, s in enumerate(seconds) if self._candidates[n].electable)[1]
        self._chosen = self._candidates[fastest], timing
        self._stats.decision = tuple(
            Prediction(candidate.name, step_s, not candidate.settings.keeps, number == fastest)
            for number, (candidate, step_s) in enumerate(zip(self._candidates, seconds, strict=True))
        )

    def _become(self, candidate: Candidate, timing: Timing | None = None) -> SyncEngine:
        """Build the engine of the candidate, and end this one."""
        engine: SyncEngine
        if isinstance(candidate.settings, SparseSync):
            engine = Sparse(candidate.settings, self._buffer, self._steps_per_epoch)
        else:
            engine = Scheduler(declare(candidate.settings), self._buffer, self._network, timing)
        engine.elected = candidate.name
        self.close()
        self._network.topology = self._buffer.topology
        return engine
