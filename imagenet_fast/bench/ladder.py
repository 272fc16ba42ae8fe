"""Measure the gain of each technique of GradientFlow (arXiv 1902.06855), added one by one, and of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from imagenet_fast.bench.engine_tables import draw_bars, setting
from imagenet_fast.bench.engines import EngineTime, Measure, Measured
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.recipe.sync_config import HybridSync, LazySync, SparseSync
from imagenet_fast.sync import Engine

_HALF = torch.bfloat16
_STEPS: tuple[tuple[str, Measured, int | None], ...] = (
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
    ("+ 8 bits (int8)", HybridSync(wire="int8"), 6),
)
"""Label, engine, and index of the step that this one is added to (None for the first)."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: a technique added to another step."""

    step: str
    gain: float | None
    """Speedup over the step it is added to; None for the first step."""
    in_all: float
    """Speedup over the first step."""
    time: EngineTime


def bench_ladder(profile: Profile, measure: Measure) -> list[Rung]:
    """Measure every step of the ladder.

    Raise what ``measure`` raises.
    """
    times = measure(profile, [engine for _, engine, _ in _STEPS])
    return [
        Rung(
            step,
            times[below].step_s / time.step_s if below is not None else None,
            times[0].step_s / time.step_s,
            time,
        )
        for (step, _, below), time in zip(_STEPS, times, strict=False)  # the DDP rows at the end are left out
    ]


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """Build a table with one row per step."""
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
    table.title = _title(rungs)
    return table


def draw_ladder(rungs: Sequence[Rung], figure: Any) -> None:
    """Draw one bar per step, with the gain of the step."""
    notes = [f"{rung.time.step_s:.2f} s" + ("" if rung.gain is None else f", {rung.gain:.2f} times") for rung in rungs]
    draw_bars([rung.step for rung in rungs], [rung.time for rung in rungs], notes, _title(rungs), figure)


def _title(rungs: Sequence[Rung]) -> str:
    return f"{setting(rungs[0].time)}: compute {rungs[0].time.compute_s:.3f} s"
