"""Past runs compared: a table and an image, from what they recorded and nothing else (no torch needed)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.markup import escape
from rich.table import Table

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.jsonl import read_events
from imagenet_fast.metrics.plots import new_figure
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.metrics.tables import NOTHING, compact_table, number

SETTLING_STEPS = 10
"""In the first ones engines watch, measure the network and plan; what a step takes is told of the others."""

FINAL_WEIGHTS = Path("checkpoints") / "final.safetensors"
"""Inside the directory of a run that came to its end."""


@dataclass(frozen=True)
class PastRun:
    folder: Path
    outcome: RunResult | None
    events: list[dict[str, Any]]
    name: str = ""
    """Instead of its recipe's and its engine's."""
    damaged: bool = False
    """There is an outcome, but it cannot be read."""

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        begun = next((e for e in self.events if e["event"] == "run"), None)
        if begun is None:
            return self.folder.name
        layout = begun.get("layout", f"x{begun.get('world_size')}")  # of a run that was recorded before there were any
        return f"{begun.get('recipe')} {begun.get('sync')} {layout}"

    @property
    def status(self) -> str:
        """How it ended, as far as it is recorded."""
        if self.damaged:
            return "outcome damaged"
        if self.outcome is not None:
            return self.outcome.status
        return "not ended" if self.events else "nothing recorded"

    def curve(self, event: str, value: str) -> tuple[list[float], list[float]]:
        """Run minutes and values, NaN where a value was not finite: a gap when it is drawn."""
        points = [e for e in self.events if e["event"] == event]
        return [p["run_s"] / 60 for p in points], [math.nan if _is_missing(p, value) else p[value] for p in points]

    def last(self, value: str, event: str | None = None) -> Any:
        """The number that was recorded last, by ``event`` or by any; None where none was."""
        last: dict[str, Any] = next((e for e in reversed(self.events) if event in (None, e["event"])), {})
        return None if _is_missing(last, value) else last[value]

    def by_step(self, event: str, value: str, after: int = 0) -> list[float]:
        """What was recorded of each interval of steps that begins ``after`` so many, once for each of its steps; of an
        interval of which it was not recorded, or not finite, nothing."""
        values: list[float] = []
        begun = 0
        for interval in (e for e in self.events if e["event"] == event):
            if begun >= after and not _is_missing(interval, value):
                values += [interval[value]] * (interval["step"] - begun)
            begun = interval["step"]
        return values

    @property
    def step_s(self) -> float | None:
        """Seconds a step: the median, without the first."""
        rates = self.by_step("speed", "images_per_s", SETTLING_STEPS)
        batch = next((e.get("global_batch") for e in self.events if e["event"] == "run"), None)
        return median(batch / rate for rate in rates) if rates and batch is not None else None


def _is_missing(event: dict[str, Any], value: str) -> bool:
    """Also where something else has come to stand there."""
    return not isinstance(event.get(value), int | float)


def read_run(folder: Path) -> PastRun:
    """A run directory's record; a damaged outcome is named on stderr, and the events tell what they can. Raises
    UserError where there is no record."""
    if not (folder / "events.jsonl").is_file():
        raise UserError(f"{folder} is not a run directory (it has no events.jsonl); give one that `train` made")
    outcome, damaged = None, False
    try:
        outcome = read_outcome(folder)
    except UserError as error:
        warn(str(error))
        damaged = True
    return PastRun(folder, outcome, read_events(folder), damaged=damaged)


def distinct_names(runs: Sequence[PastRun]) -> list[str]:
    """The labels of ``runs``; those that several have with the end of each one's path, as short as tells them apart."""
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


def split_checkpoint(given: Path) -> tuple[Path, str | None]:
    """A run directory and which of its checkpoints, from ``RUN@WHICH``; any other path as it is, and None.

    What exists under the whole name is meant by it. Raises UserError where that cannot be found out.
    """
    before, at, which = str(given).rpartition("@")
    try:
        if not at or "/" in which or given.exists() or not Path(before).is_dir():
            return given, None
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror}); give a file of weights, or a run") from None
    return Path(before), which


def run_of(given: Path) -> Path:
    """The directory of the run that these weights are said to be of: a run, ``RUN@WHICH`` or a ``step-*`` directory."""
    folder, _ = split_checkpoint(given)
    return folder.parents[1] if is_checkpoint(folder) and folder.parent.name == "checkpoints" else folder


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint rather than a run, as far as its name and its files' tell."""
    return folder.name.startswith("step-") and (folder / "manifest.json").is_file()


def weights_file(given: Path) -> Path:
    """The weights that ``given`` stands for: a file itself, a run directory its final ones. Raises UserError."""
    try:
        if given.is_file():
            return given
        if (given / FINAL_WEIGHTS).is_file():
            return given / FINAL_WEIGHTS
        ended = not (given / "job.json").exists()
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror}); give a file of weights, or a run") from None
    if not ended:
        raise UserError(
            f"{given} holds a run without {FINAL_WEIGHTS}, since it has not come to its end; give one of its "
            f"checkpoints, as {given}@newest, another run, or a file of weights"
        )
    if given.is_dir():
        raise UserError(f"{given} is a directory without a run; give one that `train` made, or a file of weights")
    raise UserError(f"there is no file {given}; give a file of weights, or a run directory that `train` made")


def report_table(runs: list[PastRun]) -> Table:
    """One row a run; a column in which no run has anything is left out, and names are folded where there is no room.

    Top-1 in percent; the loss of the last log interval; seconds to the target; seconds a step, the median without the
    first; images/s of the whole training; the percentage of it that was waited for data, where that is too much; MB
    that a rank sends a step, by our own count and by the kernel's, means without the first.
    """
    rows = [_numbers(run) for run in runs]
    filled = [heading for heading in rows[0] if any(row[heading] != NOTHING for row in rows)] if rows else []
    named = zip(distinct_names(runs), runs, rows, strict=True)
    return compact_table(
        ("run", "status"),
        filled,
        ((escape(name), run.status, *(row[heading] for heading in filled)) for name, run, row in named),
    )


def _numbers(run: PastRun) -> dict[str, str]:
    """By heading. Of a run whose rank 0 was lost, or has not ended yet, what its events tell."""
    outcome = run.outcome if run.outcome is not None and run.outcome.steps else None
    sent_MB = run.by_step("sync", "sent_MB", SETTLING_STEPS) or run.by_step("sync", "sent_MB")
    link_MB = run.by_step("sync", "link_MB", SETTLING_STEPS)
    return {
        "top-1 %": number(outcome.top1 if outcome else run.last("top1", "eval"), ".2f"),
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
    """Validation accuracy and training loss over run time, one line a run."""
    figure = new_figure(png, 10, 4)
    accuracy, loss = figure.subplots(1, 2)
    for name, run in zip(distinct_names(runs), runs, strict=True):
        label = name if run.status in ("reached", "finished") else f"{name} ({run.status})"
        (line,) = accuracy.plot(*run.curve("eval", "top1"), marker="o", markersize=4, label=label)
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
