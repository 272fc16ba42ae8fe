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
        self._trained_s = 0.0
        self._trains_since: float | None = None
        """When the training time was last started, which is not in ``_trained_s`` yet; None: it stands still."""

    def run_s(self) -> float:
        """Return the run time so far, in seconds."""
        return time.perf_counter() - self._begun

    def train_s(self) -> float:
        """Return the training time so far, in seconds."""
        return self._trained_s + (0.0 if self._trains_since is None else time.perf_counter() - self._trains_since)

    def begin_training(self) -> None:
        """Start the training time, at the first step of the run or of its resumed part; later calls do nothing."""
        if self._trains_since is None:
            self._trains_since = time.perf_counter()

    def go_on(self, run_s: float, train_s: float) -> None:
        """Continue from these times, which were saved.

        The time since this clock was created counts as run time; the gap since they were saved does not. A clock of a
        run that has trained goes back to them.
        """
        self._begun = (self._begun if self._trains_since is None else time.perf_counter()) - run_s
        self._trained_s, self._trains_since = train_s, None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time inside this context from the training time, not from the run time."""
        trains = self._trains_since is not None
        self._trained_s, self._trains_since = self.train_s(), None
        try:
            yield
        finally:
            if trains:
                self.begin_training()
