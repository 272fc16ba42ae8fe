"""Show engines' step times as a table and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mode
from typing import Any

from rich.table import Table

from imagenet_fast.bench.engines import EngineTime
from imagenet_fast.metrics.tables import compact_table

COMPUTE_COLOUR, EXPOSED_COLOUR = "#4c72b0", "#dd8452"


def setting(time: EngineTime) -> str:
    """Describe what was replayed and where, such as ``1/4 of alexnet, 4 hosts of 2 ranks, 250mbit``."""
    model = f"1/{time.scale} of {time.model}" if time.scale > 1 else time.model
    hosts = f"{time.hosts} host{'s' if time.hosts > 1 else ''}"
    ranks = f" of {time.ranks_per_host} ranks" if time.ranks_per_host > 1 else ""
    return f"{model}, {hosts}{ranks}, {'loopback' if time.rate is None else time.rate}"


def sync_table(times: Sequence[EngineTime]) -> Table:
    """Build a table with one row per engine."""
    wire = _common_wire(times)
    table = compact_table(
        ("engine",),
        ("s a step", "spread", "MB", "kernel", "x DDP", "x limit", "predicted"),
        (
            (
                t.engine if t.wire == wire else f"{t.engine} {t.wire}", f"{t.step_s:.3f}",
                f"±{(t.step_s_max - t.step_s_min) / 2:.3f}", f"{t.sent_bytes / 1e6:.1f}",
                "-" if t.kernel_bytes is None else f"{t.kernel_bytes / 1e6:.1f}", f"{t.ratio_to_ddp:.2f}",
                f"{t.ratio_to_limit:.3f}", f"{t.predicted_s:.3f}",
            )
            for t in times
        ),
    )  # fmt: skip
    table.title = _sync_title(times)
    return table


def draw_sync(times: Sequence[EngineTime], figure: Any) -> None:
    """Draw one bar per engine."""
    wire = _common_wire(times)
    names = [t.engine if t.wire == wire else f"{t.engine}, {t.wire}" for t in times]
    draw_bars(names, times, [f"{t.step_s:.2f} s" for t in times], _sync_title(times), figure)


def draw_bars(names: Sequence[str], times: Sequence[EngineTime], notes: Sequence[str], title: str, figure: Any) -> None:
    """Draw one bar per name: compute, exposed communication, a mark at the limit, and a note.

    Args:
        names: Labels of the bars.
        times: The time of each bar.
        notes: Text at the end of each bar.
        title: Title of the figure.
        figure: A Matplotlib figure.
    """
    axes = figure.subplots()
    compute = [t.compute_s for t in times]
    axes.barh(names, compute, color=COMPUTE_COLOUR, label="compute")
    exposed = [max(0.0, t.exposed_s) for t in times]
    axes.barh(names, exposed, left=compute, color=EXPOSED_COLOUR, label="exposed communication")
    for row, (t, note) in enumerate(zip(times, notes, strict=True)):
        axes.plot([t.limit_s] * 2, [row - 0.4, row + 0.4], color="black", label=None if row else "limit of its kind")
        beyond = (max(t.step_s, t.limit_s), row)
        axes.annotate(note, beyond, xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.08 + 0.007 * max(map(len, notes)))
    axes.set(xlabel="seconds a step")
    finish(axes, title, figure)


def finish(axes: Any, title: str, figure: Any) -> None:
    """Add the title, frame and legend that all figures of step times share."""
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _common_wire(times: Sequence[EngineTime]) -> str:
    """Return the most frequent wire dtype."""
    return mode(t.wire for t in times)


def _sync_title(times: Sequence[EngineTime]) -> str:
    main = next(t for t in times if t.wire == _common_wire(times))
    return f"{setting(main)}, {main.wire}: compute {main.compute_s:.3f} s, raw all-reduce {main.raw_s:.3f} s"
