"""Compare past runs: a table of their results, and their curves; without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from imagenet_fast.metrics.past_run import SETTLING_STEPS, PastRun
from imagenet_fast.metrics.tables import Row, column, new_figure, plot_label
from imagenet_fast.run.result import BEARABLE_WAIT_PCT, target_metric


@dataclass(frozen=True)
class RunSummary(Row):
    """The results of one run; a number that is not known is None."""

    run: str = field(metadata=column("run"))
    """Name of the run, no other run's."""
    status: str = field(metadata=column("status"))
    """Its status, as far as it is recorded."""
    folder: str
    """Its directory."""
    top1: float | None = field(metadata=column("top-1", "%", ".2f"))
    """Top-1 of the last evaluation in percent."""
    top1_mirror: float | None = field(metadata=column("mirror", "%", ".2f"))
    """The same, with the logits of each image and its mirror image averaged."""
    top1_shift: float | None = field(metadata=column("shift", "%", ".2f"))
    """The same, averaged over shifts, too."""
    loss: float | None = field(metadata=column("loss", form=".4f"))
    """Training loss of the last log interval."""
    time_to_accuracy_s: float | None = field(metadata=column("target", "s", ".1f"))
    """Seconds from the beginning of the run to the end of the evaluation that reached its target."""
    steps: int | None = field(metadata=column("steps", form="d"))
    """Number of steps."""
    step_s: float | None = field(metadata=column("s/step", form=".3f"))
    """Median seconds of the steps after the first ten."""
    images_per_s: float | None = field(metadata=column("img/s", form=".0f"))
    """Images a second of the whole training."""
    data_wait_pct: float | None = field(metadata=column("wait", "%", ".1f"))
    """Share of training that waited for data in percent, if it is too much."""
    sent_MB: float | None = field(metadata=column("MB/step", form=".2f"))
    """MB that a rank sends per step, counted by the program: a mean of the steps that ``step_s`` is of."""
    link_MB: float | None = field(metadata=column("link MB", form=".2f"))
    """The same, counted by the kernel."""


def distinct_names(runs: Sequence[PastRun]) -> list[str]:
    """Return a distinct name for each of ``runs``: a label that several share is followed by the run's path."""
    labels = Counter(run.label for run in runs)
    return [f"{run.label} ({run.folder})" if labels[run.label] > 1 else run.label for run in runs]


def summaries(runs: Sequence[PastRun]) -> list[RunSummary]:
    """Return one row per run."""
    rows = []
    for name, run in zip(distinct_names(runs), runs, strict=True):
        wait_pct = run.last("data_wait_pct", "end")
        sent_MB = run.by_step("sync", "sent_MB", SETTLING_STEPS) or run.by_step("sync", "sent_MB")
        link_MB = run.by_step("sync", "link_MB", SETTLING_STEPS)
        rows.append(RunSummary(
            name, run.status, str(run.folder),
            run.last("top1", "eval"), run.last("top1_mirror", "eval"), run.last("top1_shift", "eval"),
            run.last("loss", "train"), run.last("time_to_accuracy_s", "end"), run.last("step"), run.step_s,
            run.last("images_per_s", "end") or None, wait_pct if wait_pct and wait_pct > BEARABLE_WAIT_PCT else None,
            fmean(sent_MB) if sent_MB else None, fmean(link_MB) if link_MB else None,
        ))  # fmt: skip
    return rows


def draw_curves(runs: Sequence[PastRun], png: Path) -> None:
    """Draw validation accuracy and training loss over run time, one line per run.

    If a run's target is for an accuracy by mean logits, a dashed line shows that, too.
    """
    figure = new_figure(10, 4)
    accuracy, loss = figure.subplots(1, 2)
    for name, run in zip(distinct_names(runs), runs, strict=True):
        label = plot_label(name if run.status in ("reached", "finished") else f"{name} ({run.status})")
        (line,) = accuracy.plot(*run.curve("eval", "top1"), marker="o", markersize=4, label=label)
        color = line.get_color()
        if run.last("target_mirrored", "run"):
            metric = target_metric({"top1_shift": run.last("top1_shift", "eval")}, mirrored=True)
            accuracy.plot(*run.curve("eval", metric), "o--", markersize=4, color=color, label=f"{label}, mean")
        loss.plot(*run.curve("train", "loss"), color=color, linewidth=1)
    for target in {run.last("target_top1", "run") for run in runs} - {None}:
        accuracy.axhline(target, color="black", linestyle=":", linewidth=1)
        accuracy.annotate(f"target {target:g} %", (0, target), xytext=(2, 3), textcoords="offset points", fontsize=8)
    accuracy.set(title="Validation", xlabel="run time (minutes)", ylabel="top-1 (%)")
    loss.set(title="Training", xlabel="run time (minutes)", ylabel="loss")
    for axes in (accuracy, loss):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    accuracy.legend(loc="lower right", frameon=False)
    figure.savefig(png)
