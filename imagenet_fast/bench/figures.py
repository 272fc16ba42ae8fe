"""Draw the rows of each benchmark into a Matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from imagenet_fast.bench.tables import (
    bandwidth_title,
    batch_title,
    common_wire,
    ladder_title,
    loading_title,
    pipeline_title,
    sync_title,
)
from imagenet_fast.units import size_text

if TYPE_CHECKING:
    from imagenet_fast.bench.collectives import AllReduceTime
    from imagenet_fast.bench.dataloaders import LoadingRate
    from imagenet_fast.bench.engines import EngineTime
    from imagenet_fast.bench.pipeline import PipelineTime
    from imagenet_fast.bench.presets import BatchRow, Rung

_COMPUTE_COLOUR, _EXPOSED_COLOUR = "#4c72b0", "#dd8452"


def draw_sync(times: Sequence[EngineTime], figure: Any) -> None:
    """Draw one bar per engine."""
    wire = common_wire(times)
    names = [t.engine if t.wire == wire else f"{t.engine}, {t.wire}" for t in times]
    _draw_bars(names, times, [f"{t.step_s:.2f} s" for t in times], sync_title(times), figure)


def draw_ladder(rungs: Sequence[Rung], figure: Any) -> None:
    """Draw one bar per step, with the gain of the step."""
    notes = [f"{rung.time.step_s:.2f} s" + ("" if rung.gain is None else f", {rung.gain:.2f} times") for rung in rungs]
    _draw_bars([rung.step for rung in rungs], [rung.time for rung in rungs], notes, ladder_title(rungs), figure)


def _draw_bars(
    names: Sequence[str], times: Sequence[EngineTime], notes: Sequence[str], title: str, figure: Any
) -> None:
    """Draw one bar per name: compute, exposed communication, a mark at the limit, and a note at its end."""
    axes = figure.subplots()
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
    axes.set(xlabel="seconds a step")
    axes.set_title(title, fontsize=9)
    _finish(figure)


def draw_batches(rows: Sequence[BatchRow], figure: Any) -> None:
    """Draw bars for DDP and hybrid at each batch size: compute, exposed communication, and the gain."""
    axes = figure.subplots()
    width, places = 0.38, range(len(rows))
    pairs = (("DDP", "//", [row.ddp for row in rows]), ("hybrid", "", [row.hybrid for row in rows]))
    for side, (name, hatch, times) in zip((-0.5, 0.5), pairs, strict=True):
        at = [place + side * width for place in places]
        compute, exposed = [t.compute_s for t in times], [max(0.0, t.exposed_s) for t in times]
        axes.bar(at, compute, 0.95 * width, color=_COMPUTE_COLOUR, label="compute" if side < 0 else None)
        axes.bar(
            at, exposed, 0.95 * width, bottom=compute, color=_EXPOSED_COLOUR, hatch=hatch, edgecolor="white",
            label=f"exposed under {name}",
        )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        top = (place + width / 2, max(row.hybrid.step_s, row.hybrid.compute_s))
        axes.annotate(f"{-row.gain:+.0%}", top, xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(places, [str(row.batch) for row in rows])
    axes.set(xlabel="batch a rank", ylabel="seconds a step")
    axes.set_title(batch_title(rows), fontsize=9)
    _finish(figure)


def draw_bandwidth(rows: Sequence[AllReduceTime], figure: Any) -> None:
    """Plot latency and link utilisation over message size.

    If a row has no utilisation, plot bus bandwidth instead.
    """
    latency, use = figure.subplots(1, 2)
    shared = all(row.utilisation is not None for row in rows)
    sizes = sorted({row.bytes for row in rows})
    for place, name in enumerate(dict.fromkeys(row.collective for row in rows)):
        own = [row for row in rows if row.collective == name]
        style = {"color": f"C{place}", "marker": "osD^vP*X"[place % 8], "markersize": 4, "linewidth": 1.4}
        style |= {"linestyle": "--" if name == "mpi" else ":" if name == "native" else "-"}
        label = {"mpi": "MPI", "native": f"{own[0].backend}'s own"}.get(name, name.replace("_", " "))
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
    figure.suptitle(bandwidth_title(rows[0]), fontsize=9)
    _finish(figure, columns=4)


def draw_pipeline(rows: Sequence[PipelineTime], figure: Any) -> None:
    """Draw the timeline of one step for each schedule.

    It has one line per rank, with forward passes, backward passes and idle time. Of each schedule it is the row with
    two micro-batches per rank, or the nearest.
    """
    schedules = dict.fromkeys(row.schedule for row in rows)
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    for axes, schedule in zip(panels, schedules, strict=True):
        own = [row for row in rows if row.schedule == schedule]
        _draw_timeline(min(own, key=lambda row: abs(row.micro_batches - 2 * row.stages)), axes)
    panels[-1].set(xlabel="seconds")
    figure.suptitle(pipeline_title(rows), fontsize=9)
    _finish(figure)


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
    axes.set_title(f"{row.schedule}, {row.micro_batches} micro-batches: {bubble}", fontsize=9, loc="left")


def draw_loading(rates: Sequence[LoadingRate], figure: Any) -> None:
    """Draw one bar per loader, with an error bar from its slowest to its fastest round."""
    axes = figure.subplots()
    there = [rate for rate in reversed(rates) if rate.images_per_s]
    typical = [rate.images_per_s or 0.0 for rate in there]
    below = [(rate.images_per_s or 0.0) - (rate.slowest or 0.0) for rate in there]
    above = [(rate.fastest or 0.0) - (rate.images_per_s or 0.0) for rate in there]
    colours = ["tab:blue" if rate.loader in ("folder", "dali") else "tab:gray" for rate in there]
    bars = axes.barh([rate.loader for rate in there], typical, xerr=(below, above), color=colours, ecolor="black")
    axes.bar_label(bars, [f"{rate:.0f}" for rate in typical], label_type="center", color="white")
    axes.set(xlabel="images a second", title=loading_title(rates))
    _finish(figure, columns=0)


def _finish(figure: Any, columns: int = 3) -> None:
    """Hide the top and right spines, and put the first axes' legend below, in ``columns``; 0: no legend."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if columns:
        shown = figure.axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=columns, frameon=False)
