"""Read the record of a past run; without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.events import Event, read_events
from imagenet_fast.run.result import read_outcome
from imagenet_fast.run.run_dir import RunDir

SETTLING_STEPS = 10
"""First steps of a run that are left out of step times and traffic.

In them engines watch steps, measure the network and plan.
"""


@dataclass(frozen=True)
class PastRun:
    """The record of a run."""

    folder: Path
    events: Sequence[Event]
    status: str
    """Status of the run, as far as it is recorded."""
    name: str = ""
    """A label to use instead of recipe, engine and layout."""

    @property
    def begun(self) -> Event:
        """The event with which the run began; empty if that is not recorded."""
        return next((event for event in self.events if event["event"] == "run"), {})

    @property
    def label(self) -> str:
        """The name; without one recipe, engine and layout, or the directory's name if they are unknown."""
        known = " ".join(str(self.begun.get(key)) for key in ("recipe", "sync", "layout")) if self.begun else ""
        return self.name or known or self.folder.name

    def curve(self, event: str, value: str) -> tuple[list[float], list[float]]:
        """Return run times in minutes and values; NaN, a gap in a plot, where a value was not finite."""
        points = [e for e in self.events if e["event"] == event]
        values = [_number(point, value) for point in points]
        return [point["run_s"] / 60 for point in points], [math.nan if v is None else v for v in values]

    def last(self, value: str, event: str | None = None) -> Any:
        """Return the number in the last event, of name ``event`` if given; None if that has none."""
        return _number(next((e for e in reversed(self.events) if event in (None, e["event"])), {}), value)

    def by_step(self, event: str, value: str, after: int = 0) -> list[float]:
        """Return a value recorded per interval of steps, repeated for each step of its interval.

        Intervals that begin before step ``after`` are left out, and so are those without a finite value.
        """
        values: list[float] = []
        begun = 0
        for interval in (e for e in self.events if e["event"] == event):
            if begun >= after and (known := _number(interval, value)) is not None:
                values += [known] * (interval["step"] - begun)
            begun = interval["step"]
        return values

    @property
    def step_s(self) -> float | None:
        """Median seconds per step, without the first ``SETTLING_STEPS`` steps; None if nothing is recorded."""
        rates = self.by_step("speed", "images_per_s", SETTLING_STEPS)
        batch = self.begun.get("global_batch")
        return median(batch / rate for rate in rates) if rates and batch is not None else None


def _number(event: Event, name: str) -> float | None:
    """Return a number of an event; None if it was not finite, or the file is damaged."""
    value = event.get(name)
    return value if isinstance(value, int | float) else None


def read_run(folder: Path) -> PastRun:
    """Read the record of a run directory. If the outcome is damaged, print a warning on stderr.

    Raises:
        UserError: There is no record.
    """
    if not (events := RunDir(folder).events).is_file():
        raise UserError(f"{folder} is not a run directory (it has no {events.name}); give one that `train` made")
    try:
        outcome = read_outcome(folder)
    except UserError as error:
        warn(str(error))
        return PastRun(folder, read_events(folder), "outcome damaged")
    return PastRun(folder, read_events(folder), "not ended" if outcome is None else outcome.status)
