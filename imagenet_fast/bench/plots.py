"""Plots of the rows of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from imagenet_fast.metrics.tables import legend_below
from imagenet_fast.units import size_text

if TYPE_CHECKING:
    from imagenet_fast.bench.collectives import AllReduceTime
    from imagenet_fast.bench.dataloaders import LoadingRate
    from imagenet_fast.bench.engines import EngineTime
    from imagenet_fast.bench.pipeline import PipelineTime

_COMPUTE_COLOUR, _EXPOSED_COLOUR = "#4c72b0", "#dd8452"


def draw_steps(rows: Sequence[EngineTime], figure: Any) -> None:
    """Draw a bar for each step, with its time."""
    draw_bars([(f"{row.engine}, {row.wire}", f"{row.step_s:.2f} s", row) for row in rows], rows[0].title, figure)


def draw_bars(bars: Sequence[tuple[str, str, EngineTime]], title: str, figure: Any) -> None:
    """Draw a bar for each step: compute, exposed communication, and a mark at the limit.

    Each has a name, and a note that stands at its end.
    """
    figure.set_size_inches(9, 0.4 * len(bars) + 2)
    axes = figure.subplots()
    names, notes, times = zip(*bars, strict=True)
    compute = [t.compute_s for t in times]
    axes.barh(names, compute, color=_COMPUTE_COLOUR, label="compute")
    exposed = [max(0.0, t.exposed_s) for t in times]
    axes.barh(names, exposed, left=compute, color=_EXPOSED_COLOUR, label="exposed communication")
    for row, (t, note) in enumerate(zip(times, notes, strict=True)):
        axes.plot([t.limit_s] * 2, [row - 0.4, row + 0.4], color="black", label=None if row else "limit of its kind")
        beyond = (max(t.step_s, t.limit_s), row)
        axes.annotate(note, beyond, xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.08 + 0.007 * max(map(len, notes)))
    axes.set(xlabel="seconds a step", title=title)
    legend_below(figure)


def draw_bandwidth(rows: Sequence[AllReduceTime], figure: Any) -> None:
    """Plot latency and link utilisation over message size.

    If a row has no utilisation, plot bus bandwidth instead.
    """
    figure.set_size_inches(11, 5)
    latency, use = figure.subplots(1, 2)
    shared = all(row.utilisation is not None for row in rows)
    sizes = sorted({row.bytes for row in rows})
    for place, (name, backend) in enumerate(dict.fromkeys((row.collective, row.backend) for row in rows)):
        own = [row for row in rows if (row.collective, row.backend) == (name, backend)]
        style = {"color": f"C{place}", "marker": "osD^vP*X"[place % 8], "markersize": 4, "linewidth": 1.4}
        label = f"{backend}'s own" if name == "native" else name.replace("_", " ")
        at = [row.bytes for row in own]
        latency.plot(at, [1e3 * row.latency_s for row in own], label=label, **style)
        use.plot(at, [100 * (row.utilisation or 0) if shared else row.bus_bandwidth / 1e6 for row in own], **style)
    for axes in (latency, use):
        axes.set_xscale("log", base=2)
        ticks = sizes[:: -(-len(sizes) // 8)]
        axes.set_xticks(ticks, [size_text(size) for size in ticks], rotation=45, ha="right")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(xlabel="message")
    latency.set_yscale("log")
    latency.set(ylabel="milliseconds an all-reduce")
    use.set(ylabel="% of the link's rate" if shared else "bus bandwidth, MB/s")
    use.set_ylim(0, max(100.0, use.get_ylim()[1]) if shared else None)
    figure.suptitle(rows[0].title, fontsize=9)
    legend_below(figure, 4)


def draw_pipeline(rows: Sequence[PipelineTime], figure: Any) -> None:
    """Draw the timeline of one step for each schedule.

    It has one line per rank, with forward passes, backward passes and idle time. Of each schedule it is the row with
    two micro-batches per rank, or the nearest.
    """
    schedules = dict.fromkeys(row.schedule for row in rows)
    figure.set_size_inches(9, 1 + len(schedules) * (0.6 + 0.3 * rows[0].stages))
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    for axes, schedule in zip(panels, schedules, strict=True):
        own = [row for row in rows if row.schedule == schedule]
        _draw_timeline(min(own, key=lambda row: abs(row.micro_batches - 2 * row.stages)), axes)
    panels[-1].set(xlabel="seconds")
    figure.suptitle(rows[0].title, fontsize=9)
    legend_below(figure)


def _draw_timeline(row: PipelineTime, axes: Any) -> None:
    """Draw the passes of each rank, labelled with the numbers of its stages, from 1."""
    ranks = range(row.stages)
    axes.barh(ranks, [row.step_s] * row.stages, 0.8, color="#e8e8e8", label="idle")
    for which, colour in (("forward", _COMPUTE_COLOUR), ("backward", _EXPOSED_COLOUR)):
        for rank in ranks:
            own = [busy for busy in row.timeline if busy.which == which and busy.stage % row.stages == rank]
            shades = [(colour, 1.0 if busy.stage < row.stages else 0.6) for busy in own]  # later stages are paler
            axes.broken_barh(
                [(busy.begin_s, busy.end_s - busy.begin_s) for busy in own], (rank - 0.4, 0.8),
                facecolors=shades, edgecolor="white", linewidth=0.5, label=None if rank else which,
            )  # fmt: skip
    stages = [sorted({busy.stage + 1 for busy in row.timeline if busy.stage % row.stages == rank}) for rank in ranks]
    axes.set_yticks(ranks, [f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}" for own in stages])
    axes.invert_yaxis()
    bubble = f"bubble {row.bubble:.2f}, by the formula {row.expected_bubble:.2f}"
    axes.set_title(f"{row.schedule}, {row.micro_batches} micro-batches: {bubble}", loc="left")


def draw_loading(rates: Sequence[LoadingRate], figure: Any) -> None:
    """Draw one bar per loader, with an error bar from its slowest to its fastest round."""
    figure.set_size_inches(8, 1 + 0.5 * len(rates))
    axes = figure.subplots()
    upwards = rates[::-1]
    typical = [rate.images_per_s for rate in upwards]
    below = [rate.images_per_s - rate.slowest for rate in upwards]
    above = [rate.fastest - rate.images_per_s for rate in upwards]
    colours = ["tab:blue" if rate.loader in ("threads", "dali") else "tab:gray" for rate in upwards]
    bars = axes.barh([rate.loader for rate in upwards], typical, xerr=(below, above), color=colours, ecolor="black")
    axes.bar_label(bars, [f"{rate:.0f}" for rate in typical], label_type="center", color="white")
    axes.set(xlabel="images a second", title=rates[0].title)
