"""Compare past runs as a table.

Only the records of the runs are read; torch is not needed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.events import read_events
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.metrics.tables import compact_table, number

SETTLING_STEPS = 10
"""First steps of a run that are left out of step times and traffic.

In them engines watch steps, measure the network and plan.
"""


@dataclass(frozen=True)
class PastRun:
    """The record of a run."""

    folder: Path
    outcome: RunResult | None
    """Result of the run; None if that is not recorded or cannot be read."""
    events: Sequence[dict[str, Any]]
    name: str = ""
    """A label to use instead of recipe, engine and layout."""
    damaged: bool = False
    """True if there is an outcome that cannot be read."""

    @property
    def begun(self) -> dict[str, Any]:
        """The event with which the run began; empty if that is not recorded."""
        return next((event for event in self.events if event["event"] == "run"), {})

    @property
    def label(self) -> str:
        """The name; without one recipe, engine and layout, or the directory's name if they are unknown."""
        begun = self.begun
        known = f"{begun.get('recipe')} {begun.get('sync')} {begun.get('layout')}" if begun else self.folder.name
        return self.name or known

    @property
    def status(self) -> str:
        """Status of the run, as far as it is recorded."""
        if self.damaged:
            return "outcome damaged"
        if self.outcome is not None:
            return self.outcome.status
        return "not ended" if self.events else "nothing recorded"

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


def _number(event: dict[str, Any], name: str) -> float | None:
    """Return a number of an event; None if it was not finite, or the file is damaged."""
    value = event.get(name)
    return value if isinstance(value, int | float) else None


def read_run(folder: Path) -> PastRun:
    """Read the record of a run directory.

    If the outcome is damaged, print a warning on stderr and use the events alone.

    Raises:
        UserError: There is no record.
    """
    if not (events := RunDir(folder).events).is_file():
        raise UserError(f"{folder} is not a run directory (it has no {events.name}); give one that `train` made")
    outcome, damaged = None, False
    try:
        outcome = read_outcome(folder)
    except UserError as error:
        warn(str(error))
        damaged = True
    return PastRun(folder, outcome, read_events(folder), damaged=damaged)


def distinct_names(runs: Sequence[PastRun]) -> list[str]:
    """Return a distinct name for each of ``runs``: a label that several share is followed by the run's path.

    The path is from the directory that holds all runs.
    """
    labels = Counter(run.label for run in runs)
    folders = [Path(os.path.abspath(run.folder)) for run in runs]  # noqa: PTH100  (links keep their own names)
    above = os.path.commonpath([folder.parent for folder in folders] or [Path("/")])
    return [
        f"{run.label} ({folder.relative_to(above)})" if labels[run.label] > 1 else run.label
        for run, folder in zip(runs, folders, strict=True)
    ]


_COLUMNS = {
    "top1": ("top-1 %", ".2f"), "top1_mirror": ("mirror %", ".2f"), "top1_shift": ("shift %", ".2f"),
    "loss": ("loss", ".4f"), "time_to_accuracy_s": ("target s", ".1f"), "steps": ("steps", "d"),
    "step_s": ("s/step", ".3f"), "images_per_s": ("img/s", ".0f"), "data_wait_pct": ("wait %", ".1f"),
    "sent_MB": ("MB/step", ".2f"), "link_MB": ("link MB", ".2f"),
}  # fmt: skip
"""Heading and format of the numbers of a row."""


def report_rows(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """Return one row per run: its name, status and directory, and these numbers, of which unknown ones are None.

    - top1, top1_mirror, top1_shift: validation accuracy in percent; by the mean logits of each image and its mirror
      image; by those of shifted images, too.
    - loss: of the last log interval.
    - time_to_accuracy_s: seconds to the target.
    - steps: steps done.
    - step_s: median seconds per step, without the first ``SETTLING_STEPS`` steps.
    - images_per_s: over the whole training.
    - data_wait_pct: percent of training spent waiting for data, if it is too much.
    - sent_MB, link_MB: MB that a rank sends per step, counted by the program and by the kernel; means without the first
      ``SETTLING_STEPS`` steps.
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
    """Return the numbers of a row; for a run that has not ended, or lost rank 0, from its events."""
    outcome = run.outcome if run.outcome is not None and run.outcome.steps else None
    sent_MB = run.by_step("sync", "sent_MB", SETTLING_STEPS) or run.by_step("sync", "sent_MB")
    link_MB = run.by_step("sync", "link_MB", SETTLING_STEPS)
    return {
        "top1": outcome.top1 if outcome else run.last("top1", "eval"),
        "top1_mirror": outcome.top1_mirror if outcome else run.last("top1_mirror", "eval"),
        "top1_shift": outcome.top1_shift if outcome else run.last("top1_shift", "eval"),
        "loss": run.last("loss", "train"),
        "time_to_accuracy_s": outcome.time_to_accuracy_s if outcome else None,
        "steps": outcome.steps if outcome else run.last("step"),
        "step_s": run.step_s,
        "images_per_s": outcome.images_per_s if outcome else None,
        "data_wait_pct": outcome.data_wait_pct if outcome and outcome.is_starved else None,
        "sent_MB": fmean(sent_MB) if sent_MB else None,
        "link_MB": fmean(link_MB) if link_MB else None,
    }
