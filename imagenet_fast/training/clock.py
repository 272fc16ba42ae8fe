"""Measure run time and training time.

- *Run time* starts when the data set is first touched and never stops.
- *Training time* starts with the first step and leaves out evaluations.
- *Time to accuracy* is the run time at the end of the first evaluation that meets the target, including that
  evaluation.

A resumed run continues both times from its checkpoint. Neither counts the gap between the two runs, nor the training
after the checkpoint that was lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Run time and training time of a run, in seconds."""

    def __init__(self) -> None:
        """Start the run time."""
        self._begun = time.perf_counter()
        self._training_begun: float | None = None
        self._paused = 0.0
        self._trained_before = 0.0

    def run_s(self) -> float:
        """Return the run time so far, in seconds."""
        return time.perf_counter() - self._begun

    def train_s(self) -> float:
        """Return the training time so far, in seconds."""
        if self._training_begun is None:
            return self._trained_before
        return self._trained_before + time.perf_counter() - self._training_begun - self._paused

    def begin_training(self) -> None:
        """Start the training time, at the first step of the run or of its resumed part; later calls do nothing."""
        if self._training_begun is None:
            self._training_begun = time.perf_counter()

    def state_dict(self) -> dict[str, float]:
        """Return both times, for a checkpoint."""
        return {"run_s": self.run_s(), "train_s": self.train_s()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the times in ``state``.

        The time since this clock was created counts as run time; the gap since ``state`` was saved does not. A clock
        of a run that has trained goes back to ``state``.
        """
        if self._training_begun is None:
            self._begun -= state["run_s"]
        else:
            self._begun, self._training_begun, self._paused = time.perf_counter() - state["run_s"], None, 0.0
        self._trained_before = state["train_s"]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time inside this context from the training time, not from the run time."""
        training, begun = self._training_begun is not None, time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begun if training else 0.0
