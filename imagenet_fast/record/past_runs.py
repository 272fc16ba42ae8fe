"""Past runs compared: a table and a picture, from what they recorded and nothing else (no torch needed)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from imagenet_fast.errors import UserError
from imagenet_fast.record.jsonl import read_events
from imagenet_fast.record.outcome import Outcome, read_outcome
from imagenet_fast.record.pictures import new_figure
from imagenet_fast.record.tables import compact_table, number

FINAL_WEIGHTS = Path("checkpoints") / "final.safetensors"
"""Inside the directory of a run that came to its end."""


@dataclass(frozen=True)
class PastRun:
    folder: Path
    outcome: Outcome | None
    events: list[dict[str, Any]]
    name: str = ""
    """Instead of its recipe's and its engine's."""

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        begun = next((e for e in self.events if e["event"] == "run"), None)
        return f"{begun['recipe']} {begun['sync']} x{begun['world_size']}" if begun else self.folder.name

    @property
    def status(self) -> str:
        """How it ended, as far as it is recorded."""
        if self.outcome is not None:
            return self.outcome.status
        return "not ended" if self.events else "nothing recorded"

    def curve(self, event: str, value: str) -> tuple[list[float], list[float]]:
        """Run minutes and values, NaN where a value was not finite: a gap when it is drawn."""
        points = [e for e in self.events if e["event"] == event]
        return [p["run_s"] / 60 for p in points], [math.nan if p[value] is None else p[value] for p in points]


def read_run(folder: Path) -> PastRun:
    """A run directory's record. Raises UserError where there is none."""
    if not (folder / "events.jsonl").is_file():
        raise UserError(f"{folder} is not a run directory (it has no events.jsonl); give one that `train` made")
    return PastRun(folder, read_outcome(folder), read_events(folder))


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
            f"{given} holds a run without {FINAL_WEIGHTS}, since it has not come to its end; give another, or a "
            "file of weights"
        )
    if given.is_dir():
        raise UserError(f"{given} is a directory without a run; give one that `train` made, or a file of weights")
    raise UserError(f"there is no file {given}; give a file of weights, or a run directory that `train` made")


def report_table(runs: list[PastRun]) -> Table:
    """One row a run: top-1 in percent, seconds to the target and of training alone."""
    return compact_table(
        ("run", "status"), ("top-1 %", "to target s", "steps", "train s", "img/s", "MB/step"), map(_row, runs)
    )


def _row(run: PastRun) -> tuple[str, ...]:
    o = run.outcome
    if o is None or not o.steps:  # rank 0 was lost, or has not ended yet: what it had reached is in its events
        top1 = next((e["top1"] for e in reversed(run.events) if e["event"] == "eval"), None)
        steps = run.events[-1]["step"] if run.events else None
        return run.label, run.status, number(top1, ".2f"), "–", number(steps, "d"), "–", "–", "–"
    sent_MB = o.sent_bytes_per_step / 1e6 if o.sent_bytes_per_step is not None else None
    return (
        run.label, run.status, number(o.top1, ".2f"), number(o.time_to_accuracy_s, ".1f"), str(o.steps),
        number(o.train_s, ".1f"), number(o.images_per_s, ".0f"), number(sent_MB, ".2f"),
    )  # fmt: skip


def draw_curves(runs: list[PastRun], png: Path) -> None:
    """Validation accuracy and training loss over run time, one line a run."""
    figure = new_figure(png, 10, 4)
    accuracy, loss = figure.subplots(1, 2)
    for run in runs:
        label = run.label if run.status in ("reached", "finished") else f"{run.label} ({run.status})"
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
