"""Time, defined before it is measured.

*Run time* starts when the data set is first touched and never stops. *Training time* starts with the first
step and leaves out evaluations. *Time to accuracy* is the run time at the end of the first evaluation that
meets the target, that evaluation included. Of a run that goes on after it was cut off both count on
from the checkpoint: what lay between, and what was trained in vain, is in neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Pause:
    """How long a pause took, once it is over."""

    seconds: float = 0.0


class Clock:
    """Both times of a run, in seconds. It starts when it is made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._training_begun: float | None = None
        self._paused = 0.0
        self._trained_before = 0.0

    def run_s(self) -> float:
        return time.perf_counter() - self._begun

    def train_s(self) -> float:
        if self._training_begun is None:
            return self._trained_before
        return self._trained_before + time.perf_counter() - self._training_begun - self._paused

    def begin_training(self) -> None:
        """The first step starts now; of a run that goes on, the first step of this part of it."""
        self._training_begun = time.perf_counter()

    def state_dict(self) -> dict[str, float]:
        return {"run_s": self.run_s(), "train_s": self.train_s()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there: what has passed since this clock was made is run time, what lay between is none."""
        self._begun -= state["run_s"]
        self._trained_before = state["train_s"]

    @contextmanager
    def pause(self) -> Iterator[Pause]:
        """What happens inside is run time, but not training time."""
        pause = Pause()
        begun = time.perf_counter()
        try:
            yield pause
        finally:
            pause.seconds = time.perf_counter() - begun
            self._paused += pause.seconds
