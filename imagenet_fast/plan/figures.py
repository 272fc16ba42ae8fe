"""Draw predictions: efficiency over GPUs, or time to train over bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imagenet_fast.plan.fastest import Way
from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.rows import known_results


def draw_plan(rows: Sequence[Planned], title: str, cluster: str, model: str, over_nic: bool, figure: Any) -> None:
    """Draw one line an engine with its band over GPUs, or its time to train over the rate of the NICs.

    Published results on the cluster are points.
    """
    axes = figure.subplots()
    for place, name in enumerate(dict.fromkeys((row.engine, row.wire) for row in rows)):
        own = [row for row in rows if (row.engine, row.wire) == name]
        at = [float((row.nic_gbit if over_nic else row.gpus) or 0) for row in own]
        style: dict[str, Any] = {"color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}
        heights = [row.train_s / 60 if over_nic else 100 * row.efficiency for row in own]
        axes.plot(at, heights, marker="o", markersize=3, label=" ".join(name), **style)
        if over_nic:
            low = [row.train_s * row.efficiency / row.efficiency_high / 60 for row in own]
            high = [row.train_s * row.efficiency / row.efficiency_low / 60 for row in own]
        else:
            low, high = ([100 * value for value in band] for band in zip(
                *((row.efficiency_low, row.efficiency_high) for row in own), strict=True
            ))  # fmt: skip
        axes.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
    if not over_nic:
        for point in known_results().published:
            if point.cluster == cluster and point.model == model and point.gbit is None:
                share = 100 * point.compute_s() / (point.step_ms / 1e3)
                axes.plot([point.gpus], [share], "k*", markersize=9)
                axes.annotate(point.name, (point.gpus, share), xytext=(5, -3), textcoords="offset points", fontsize=7)
    _over(axes, sorted({(row.nic_gbit if over_nic else row.gpus) or 0 for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="Gbit/s of a node's NICs" if over_nic else "GPUs",
        ylabel="minutes to train" if over_nic else "% of as many single GPUs",
    )
    axes.set_title(f"{title}: predicted, not run", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def draw_fastest(swept: Sequence[tuple[int, Way]], cluster: str, figure: Any) -> None:
    """Draw the minutes of the best way on up to so many GPUs each, named where the training or the engine changes."""
    axes, gpus, named = figure.subplots(), [count for count, _ in swept], ""
    axes.plot(gpus, [way.minutes for _, way in swept], marker="o", markersize=3)
    axes.fill_between(gpus, [way.least for _, way in swept], [way.most for _, way in swept], alpha=0.15, linewidth=0)
    for count, way in swept:
        if named != (named := f"{way.training}, {way.engine}"):
            axes.annotate(named, (count, way.minutes), xytext=(4, 5), textcoords="offset points", fontsize=7)
    _over(axes, gpus)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="up to so many GPUs", ylabel="minutes to the target")
    axes.set_title(f"The fastest published training on {cluster}: predicted, not run", fontsize=9)


def _over(axes: Any, ticks: Sequence[float]) -> None:
    """Let ``axes`` have a logarithmic scale to the right with ``ticks``, a grid and no frame."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
