"""Sweeps over GPUs or bandwidth: the values of `--sweep gpus=8..4096` and `--sweep nic=10..400`, and their pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import legend_below
from imagenet_fast.plan.devices import MODELS
from imagenet_fast.plan.fastest import Way
from imagenet_fast.plan.prediction import Planned, Situation
from imagenet_fast.plan.rows import known_results
from imagenet_fast.units import geometric_range


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Parse ``gpus=LIST`` or ``nic=LIST``: numbers, and ranges such as 8..64, which doubles from 8 to 64.

    Returns:
        ``gpus`` or ``nic``, and its values.

    Raises:
        UserError: It is no such sweep.
    """
    key, _, numbers = text.partition("=")
    values: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r" *(\d{1,6})(?:\.\.(\d{1,6}))? *", part, re.ASCII)
        if key not in ("gpus", "nic") or match is None:
            raise UserError(f"--sweep {text} is no sweep; write gpus=8..4096, gpus=8,64,512 or nic=10..400 (Gbit/s)")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 < first <= last:
            raise UserError(f"--sweep {text}: ranges go up from 1 or more; correct {part.strip()}")
        values |= set(geometric_range(first, last, 2))
    return key, sorted(values)


def draw_plan(predicted: Sequence[tuple[Situation, Sequence[Planned]]], title: str, figure: Any) -> None:
    """Draw one line an engine with its band over GPUs, or its time to train where only the rate of the NICs differs.

    Published results on the cluster are points.
    """
    lines: dict[str, list[tuple[float, ...]]] = {}
    over_nic = len({rows[0].nic_gbit for _, rows in predicted}) > 1
    for row in (row for _, rows in predicted for row in rows):
        band = (row.efficiency, row.efficiency_low, row.efficiency_high)
        minutes = (row.train_s * row.efficiency / share / 60 for share in band)
        heights = minutes if over_nic else (100 * share for share in band)
        at = row.nic_gbit or 0 if over_nic else row.gpus
        lines.setdefault(f"{row.engine} {row.wire}", []).append((at, *heights))
    situation = predicted[0][0]
    cluster, model = situation.cluster.name, MODELS[situation.recipe.model.kind].layers
    axes = _draw(lines, figure)
    axes.autoscale(enable=False, axis="x")  # points beyond the sweep are left out
    for point in known_results().published if not over_nic else ():
        if point.cluster == cluster and point.model == model and point.gbit is None:
            share = 100 * point.compute_s() / (point.step_ms / 1e3)
            axes.plot([point.gpus], [share], "k*", markersize=9)
            axes.annotate(point.name, (point.gpus, share), xytext=(5, -3), textcoords="offset points", fontsize=7)
    labels = ("Gbit/s of a node's NICs", "minutes to train") if over_nic else ("GPUs", "% of as many single GPUs")
    axes.set(ylim=(0, None), xlabel=labels[0], ylabel=labels[1], title=f"{title}: predicted, not run")
    legend_below(figure, 4)


def draw_fastest(swept: Sequence[tuple[int, Way]], cluster: str, figure: Any) -> None:
    """Draw the minutes of the best way on up to so many GPUs each, named where the training or the engine changes."""
    axes, named = _draw({"": [(count, way.minutes, way.least, way.most) for count, way in swept]}, figure), ""
    for count, way in swept:
        if named != (named := f"{way.training}, {way.engine}"):
            axes.annotate(named, (count, way.minutes), xytext=(4, 5), textcoords="offset points", fontsize=7)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    title = f"The fastest published training on {cluster}: predicted, not run"
    axes.set(xlabel="up to so many GPUs", ylabel="minutes to the target", title=title)


def _draw(lines: Mapping[str, Sequence[tuple[float, ...]]], figure: Any) -> Any:
    """Draw lines of places, heights and the two ends of their bands; places on a logarithmic scale. Return the axes."""
    axes = figure.subplots()
    for number, (name, points) in enumerate(lines.items()):
        at, heights, *band = zip(*points, strict=True)
        style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        axes.plot(at, heights, marker="o", markersize=3, label=name, **style)
        axes.fill_between(at, *band, color=style["color"], alpha=0.12, linewidth=0)
    ticks = sorted({point[0] for points in lines.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    return axes
