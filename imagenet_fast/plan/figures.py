"""Draw predictions: efficiency over GPUs, or time to train over bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.published import PUBLISHED


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
        for point in PUBLISHED:
            if point.cluster == cluster and point.model == model and point.gbit is None:
                share = 100 * point.compute.seconds(point.batch) / (point.step_ms / 1e3)
                axes.plot([point.gpus], [share], "k*", markersize=9)
                axes.annotate(point.name, (point.gpus, share), xytext=(5, -3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log", base=2)
    ticks = sorted({float((row.nic_gbit if over_nic else row.gpus) or 0) for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(
        xlabel="Gbit/s of a node's NICs" if over_nic else "GPUs",
        ylabel="minutes to train" if over_nic else "% of as many single GPUs",
    )
    axes.set_title(f"{title}: predicted, not run", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
