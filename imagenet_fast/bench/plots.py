"""Plots of past runs, and what every plot begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.report import PastRun, distinct_names
from imagenet_fast.metrics.run_result import target_metric


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


def draw_curves(runs: list[PastRun], png: Path) -> None:
    """Draw validation accuracy and training loss over run time, one line per run.

    If a run's target is for an accuracy by mean logits, a dashed line shows that, too.
    """
    figure = new_figure(png, 10, 4)
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    accuracy.legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(png)
