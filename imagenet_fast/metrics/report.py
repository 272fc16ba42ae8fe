"""Compare past runs as a table and as curves.

Only the records of the runs are read; torch is not needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.accuracy import target_metric
from imagenet_fast.metrics.events import read_events
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.metrics.tables import NOTHING, compact_table, number

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
    events: list[dict[str, Any]]
    name: str = ""
    """A label to use instead of recipe, engine and layout."""
    damaged: bool = False
    """True if there is an outcome that cannot be read."""

    @property
    def label(self) -> str:
        """The name; without one recipe, engine and layout, or the directory's name if they are unknown."""
        if self.name:
            return self.name
        begun = next((e for e in self.events if e["event"] == "run"), None)
        if begun is None:
            return self.folder.name
        layout = begun.get("layout", f"x{begun.get('world_size')}")  # older records have no layout
        return f"{begun.get('recipe')} {begun.get('sync')} {layout}"

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
        return [p["run_s"] / 60 for p in points], [math.nan if _is_missing(p, value) else p[value] for p in points]

    def last(self, value: str, event: str | None = None) -> Any:
        """Return the number in the last event, of name ``event`` if given; None if that has none."""
        last: dict[str, Any] = next((e for e in reversed(self.events) if event in (None, e["event"])), {})
        return None if _is_missing(last, value) else last[value]

    def by_step(self, event: str, value: str, after: int = 0) -> list[float]:
        """Return a value recorded per interval of steps, repeated for each step of its interval.

        Intervals that begin before step ``after`` are left out, and so are those without a finite value.
        """
        values: list[float] = []
        begun = 0
        for interval in (e for e in self.events if e["event"] == event):
            if begun >= after and not _is_missing(interval, value):
                values += [interval[value]] * (interval["step"] - begun)
            begun = interval["step"]
        return values

    @property
    def step_s(self) -> float | None:
        """Median seconds per step, without the first ``SETTLING_STEPS`` steps; None if nothing is recorded."""
        rates = self.by_step("speed", "images_per_s", SETTLING_STEPS)
        batch = next((e.get("global_batch") for e in self.events if e["event"] == "run"), None)
        return median(batch / rate for rate in rates) if rates and batch is not None else None


def _is_missing(event: dict[str, Any], value: str) -> bool:
    """Return whether the value is absent or not a number, as in a damaged file."""
    return not isinstance(event.get(value), int | float)


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
    """Return a distinct name for each of ``runs``.

    A label that several runs share is followed by the end of the run's path, as short as possible.
    """
    paths = [Path(os.path.abspath(run.folder)) for run in runs]  # noqa: PTH100  (links keep their own names)
    names = []
    for run, path in zip(runs, paths, strict=True):
        others = {p for other, p in zip(runs, paths, strict=True) if other.label == run.label and p != path}
        if not others:
            names.append(run.label)
            continue
        ends = (Path(*path.parts[-length:]) for length in range(1, len(path.parts) + 1))
        end = next((e for e in ends if all(p.parts[-len(e.parts) :] != e.parts for p in others)), path)
        names.append(f"{run.label} ({end})")
    return names


def report_table(runs: list[PastRun]) -> Table:
    """Return a table with one row per run.

    Columns that are empty for all runs are left out. Names are folded if the terminal is too narrow.

    - top-1 %: validation accuracy.
    - mirror %: accuracy by the mean logits of each image and its mirror image.
    - shift %: accuracy by the mean logits of shifted images, too.
    - loss: of the last log interval.
    - target s: seconds to the target.
    - steps: steps done.
    - s/step: median seconds per step, without the first ``SETTLING_STEPS`` steps.
    - img/s: images per second over the whole training.
    - wait %: share of training spent waiting for data, if it is too large.
    - MB/step, link MB: MB that a rank sends per step, counted by the program and by the kernel; means without the first
      ``SETTLING_STEPS`` steps.
    """
    rows = [_numbers(run) for run in runs]
    filled = [heading for heading in rows[0] if any(row[heading] != NOTHING for row in rows)] if rows else []
    named = zip(distinct_names(runs), runs, rows, strict=True)
    return compact_table(
        ("run", "status"),
        filled,
        ((name, run.status, *(row[heading] for heading in filled)) for name, run, row in named),
    )


def _numbers(run: PastRun) -> dict[str, str]:
    """Return a row by heading; for a run that has not ended, or lost rank 0, use its events."""
    outcome = run.outcome if run.outcome is not None and run.outcome.steps else None
    sent_MB = run.by_step("sync", "sent_MB", SETTLING_STEPS) or run.by_step("sync", "sent_MB")
    link_MB = run.by_step("sync", "link_MB", SETTLING_STEPS)
    return {
        "top-1 %": number(outcome.top1 if outcome else run.last("top1", "eval"), ".2f"),
        "mirror %": number(outcome.top1_mirror if outcome else run.last("top1_mirror", "eval"), ".2f"),
        "shift %": number(outcome.top1_shift if outcome else run.last("top1_shift", "eval"), ".2f"),
        "loss": number(run.last("loss", "train"), ".4f"),
        "target s": number(outcome.time_to_accuracy_s if outcome else None, ".1f"),
        "steps": number(outcome.steps if outcome else run.last("step"), "d"),
        "s/step": number(run.step_s, ".3f"),
        "img/s": number(outcome.images_per_s if outcome else None, ".0f"),
        "wait %": number(outcome.data_wait_pct if outcome and outcome.is_starved else None, ".1f"),
        "MB/step": number(fmean(sent_MB) if sent_MB else None, ".2f"),
        "link MB": number(fmean(link_MB) if link_MB else None, ".2f"),
    }


def draw_curves(runs: list[PastRun], png: Path) -> None:
    """Draw validation accuracy and training loss over run time, one line per run.

    If a run's target is for an accuracy by mean logits, a dashed line shows that, too.
    """
    figure = new_figure(png, 10, 4)
    accuracy, loss = figure.subplots(1, 2)
    for name, run in zip(distinct_names(runs), runs, strict=True):
        label = plot_label(name if run.status in ("reached", "finished") else f"{name} ({run.status})")
        (line,) = accuracy.plot(*run.curve("eval", "top1"), marker="o", markersize=4, label=label)
        if run.outcome is not None and run.outcome.target_mirrored:
            judged = target_metric(vars(run.outcome), mirrored=True)
            accuracy.plot(
                *run.curve("eval", judged), "o--", markersize=4, color=line.get_color(), label=f"{label}, mean"
            )
        loss.plot(*run.curve("train", "loss"), color=line.get_color(), linewidth=1)
    for target in {run.outcome.target_top1 for run in runs if run.outcome} - {None}:
        accuracy.axhline(target, color="black", linestyle=":", linewidth=1)
        accuracy.annotate(f"target {target:g} %", (0, target), xytext=(2, 3), textcoords="offset points", fontsize=8)
    accuracy.set(title="Validation", xlabel="run time (minutes)", ylabel="top-1 (%)")
    loss.set(title="Training", xlabel="run time (minutes)", ylabel="loss")
    for axes in (accuracy, loss):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    accuracy.legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(png)


def new_figure(png: Path, width: float, height: float) -> Any:
    """Create an empty matplotlib figure of ``width`` x ``height`` inches, to be saved as ``png``.

    Raises:
        UserError: The name does not end in .png.
    """
    if png.suffix != ".png":
        raise UserError(f"--png {png} does not end in .png; give a name that does")
    from matplotlib.figure import Figure  # half a second, for those who draw

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def plot_label(text: str) -> str:
    """Return ``text`` for a title or a legend: no ``$`` begins a formula, no underscore keeps it out of the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
