"""What each technique of GradientFlow (arXiv 1902.06855) gains on one network, one added to the others; and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from imagenet_fast.bench.engine_times import EngineTime, bench_sync
from imagenet_fast.cost.profile import Profile
from imagenet_fast.recipe.engine_settings import HybridSync, LazySync, SparseSync, Sync
from imagenet_fast.record.tables import compact_table
from imagenet_fast.sync import Engine

_HALF = torch.bfloat16
_STEPS: tuple[tuple[str, Sync | tuple[str, Engine], int | None], ...] = (
    (
        "an all-reduce a tensor, fp32",
        ("naive", Engine(torch.float32, "each", fuse=0, collective="native")),
        None,
    ),
    ("+ ring", ("ring", Engine(torch.float32, "each", fuse=0, collective="ring")), 0),
    ("+ 16 bits", ("16 bits", Engine(_HALF, "each", fuse=0, collective="ring")), 1),
    ("+ overlap with backward", ("overlap", Engine(_HALF, "backward", fuse=0, collective="ring")), 2),
    ("+ lazy (fused)", LazySync(wire="bf16"), 3),
    ("+ sparse (an eighth)", SparseSync(wire="bf16", dense_epochs=0.0, ramp_epochs=0.0), 4),
    ("hybrid instead of sparse", HybridSync(wire="bf16"), 4),
)
"""What is done, as which engine, and on top of which other step."""


@dataclass(frozen=True)
class Rung:
    """One technique more."""

    step: str
    gain: float | None
    """How many times faster than the step it is added to."""
    in_all: float
    """How many times faster than the first."""
    time: EngineTime


def bench_ladder(
    profile: Profile, hosts: int, ranks_per_host: int, rate: str | None, scale: int, rounds: int, steps: int
) -> list[Rung]:
    """Every step of the ladder in turn, over ``rounds`` rounds. Raises UserError as :func:`bench_sync` does."""
    times = bench_sync(
        profile, [engine for _, engine, _ in _STEPS], hosts, ranks_per_host, rate, scale, rounds, steps
    )  # fmt: skip
    return [
        Rung(
            step,
            times[below].step_s / time.step_s if below is not None else None,
            times[0].step_s / time.step_s,
            time,
        )
        for (step, _, below), time in zip(_STEPS, times, strict=False)  # DDP comes after them
    ]


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """One row a step."""
    table = compact_table(
        ("step",),
        ("s", "gain", "in all", "x limit", "predicted"),
        (
            (
                rung.step, f"{rung.time.step_s:.3f}", "" if rung.gain is None else f"{rung.gain:.2f}",
                f"{rung.in_all:.2f}", f"{rung.time.ratio_to_limit:.3f}", f"{rung.time.predicted_s:.3f}",
            )
            for rung in rungs
        ),
    )  # fmt: skip
    table.title = _title(rungs[0].time)
    return table


def draw_ladder(rungs: Sequence[Rung], figure: Any) -> None:
    """A bar a step: compute, what is exposed beyond it, and what the step gains."""
    axes = figure.subplots()
    names = [rung.step for rung in rungs]
    times = [rung.time for rung in rungs]
    axes.barh(names, [t.compute_s for t in times], color="#4c72b0", label="compute")
    exposed = [max(0.0, t.exposed_s) for t in times]
    axes.barh(names, exposed, left=[t.compute_s for t in times], color="#dd8452", label="exposed communication")
    for row, rung in enumerate(rungs):
        label = f"{rung.time.step_s:.2f} s" + ("" if rung.gain is None else f", {rung.gain:.2f} times")
        beyond = (max(rung.time.step_s, rung.time.limit_s), row)
        axes.plot([rung.time.limit_s] * 2, [row - 0.4, row + 0.4], color="black", label=None if row else "limit")
        axes.annotate(label, beyond, xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel="seconds a step")
    axes.set_title(_title(rungs[0].time), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _title(time: EngineTime) -> str:
    scale = f"1/{time.scale} of {time.model}" if time.scale > 1 else time.model
    ranks = f" of {time.ranks_per_host} ranks" if time.ranks_per_host > 1 else ""
    link = "loopback" if time.rate is None else time.rate
    return f"{scale}, {time.hosts} hosts{ranks}, {link}: compute {time.compute_s:.3f} s"
