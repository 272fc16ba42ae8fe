"""Compare past runs as a table.

Only the records of the runs are read; torch is not needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.events import Event, read_events
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.run_result import BEARABLE_WAIT_PCT, read_outcome
from imagenet_fast.metrics.tables import compact_table, number

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


def distinct_names(runs: Sequence[PastRun]) -> list[str]:
    """Return a distinct name for each of ``runs``: a label that several share is followed by the run's path."""
    labels = Counter(run.label for run in runs)
    return [f"{run.label} ({run.folder})" if labels[run.label] > 1 else run.label for run in runs]


_COLUMNS = {
    "top1": ("top-1 %", ".2f"), "top1_mirror": ("mirror %", ".2f"), "top1_shift": ("shift %", ".2f"),
    "loss": ("loss", ".4f"), "time_to_accuracy_s": ("target s", ".1f"), "steps": ("steps", "d"),
    "step_s": ("s/step", ".3f"), "images_per_s": ("img/s", ".0f"), "data_wait_pct": ("wait %", ".1f"),
    "sent_MB": ("MB/step", ".2f"), "link_MB": ("link MB", ".2f"),
}  # fmt: skip
"""Heading and format of the numbers of a row."""


def report_rows(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """Return one row per run: its name, status and directory, and numbers, of which unknown ones are None.

    ``loss`` is of the last log interval, ``step_s`` the median of the steps after the first ``SETTLING_STEPS``, and
    ``images_per_s`` of the whole training. ``data_wait_pct`` is there if it is too much. ``sent_MB`` and ``link_MB``
    are what a rank sends per step, counted by the program and by the kernel: means of the steps that ``step_s`` is of.
    """
    named = zip(distinct_names(runs), runs, strict=True)
    return [{"run": name, "status": run.status, "folder": str(run.folder), **_numbers(run)} for name, run in named]


def report_table(runs: Sequence[PastRun]) -> Table:
    """Return a table of ``report_rows``.

    Columns that are empty for all runs are left out. Names are folded if the terminal is too narrow.
    """
    rows = report_rows(runs)
    filled = {key: shown for key, shown in _COLUMNS.items() if any(row[key] is not None for row in rows)}
    return compact_table(
        ("run", "status"),
        [heading for heading, _ in filled.values()],
        ((row["run"], row["status"], *(number(row[key], form) for key, (_, form) in filled.items())) for row in rows),
    )


def _numbers(run: PastRun) -> dict[str, float | None]:
    """Return the numbers of a row."""
    wait_pct = run.last("data_wait_pct", "end")
    sent_MB = run.by_step("sync", "sent_MB", SETTLING_STEPS) or run.by_step("sync", "sent_MB")
    link_MB = run.by_step("sync", "link_MB", SETTLING_STEPS)
    return {
        "top1": run.last("top1", "eval"),
        "top1_mirror": run.last("top1_mirror", "eval"),
        "top1_shift": run.last("top1_shift", "eval"),
        "loss": run.last("loss", "train"),
        "time_to_accuracy_s": run.last("time_to_accuracy_s", "end"),
        "steps": run.last("step"),
        "step_s": run.step_s,
        "images_per_s": run.last("images_per_s", "end") or None,
        "data_wait_pct": wait_pct if wait_pct and wait_pct > BEARABLE_WAIT_PCT else None,
        "sent_MB": fmean(sent_MB) if sent_MB else None,
        "link_MB": fmean(link_MB) if link_MB else None,
    }
