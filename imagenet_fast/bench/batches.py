"""Compare hybrid with DDP at several batch sizes: the table of the hybrid all-reduce thesis.

Compute time grows with the batch and communication time does not. With a small batch, communication takes longer than
the compute that could hide it; with a large batch there is little to hide. After Kim et al.
(doi 10.3745/KTCCS.2021.10.7.191), whose gain is up to 33 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from imagenet_fast.bench.engine_tables import COMPUTE_COLOUR, EXPOSED_COLOUR, finish, setting
from imagenet_fast.bench.engines import EngineTime, Measure
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.recipe.sync_config import DdpSync, HybridSync


@dataclass(frozen=True)
class BatchRow:
    """Times of DDP and hybrid at one batch size."""

    batch: int
    gain: float
    """Share of DDP's step time that hybrid saves."""
    ddp: EngineTime
    hybrid: EngineTime


def bench_batches(profile: Profile, batches: Sequence[int], measure: Measure) -> list[BatchRow]:
    """Time DDP and hybrid with bf16 on the wire at each batch size.

    Raise what ``measure`` raises.

    Args:
        profile: The layer profile to replay. The largest batch computes as long as the profile; the compute time of
            the others is proportional to their batch size.
        batches: Batch sizes per rank.
        measure: Times engines on a given network.
    """
    rows = []
    for batch in batches:
        at = profile.lasting(profile.compute_s * batch / max(batches))
        ddp, hybrid = measure(at, [DdpSync(wire="bf16"), HybridSync(wire="bf16")])
        rows.append(BatchRow(batch, 1 - hybrid.step_s / ddp.step_s, ddp, hybrid))
    return rows


def batch_table(rows: Sequence[BatchRow]) -> Table:
    """Build a table with one row per batch size.

    ``+`` is exposed communication. Limit and prediction are hybrid's.
    """
    table = compact_table(
        (),
        ("batch", "compute", "ddp", "+", "hybrid", "+", "gain", "x limit", "predicted"),
        (
            (
                str(row.batch), f"{row.ddp.compute_s:.3f}", f"{row.ddp.step_s:.3f}", f"{row.ddp.exposed_s:.3f}",
                f"{row.hybrid.step_s:.3f}", f"{row.hybrid.exposed_s:.3f}", f"{row.gain:.1%}",
                f"{row.hybrid.ratio_to_limit:.3f}", f"{row.hybrid.predicted_s:.3f}",
            )
            for row in rows
        ),
    )  # fmt: skip
    table.title = _title(rows)
    return table


def draw_batches(rows: Sequence[BatchRow], figure: Any) -> None:
    """Draw bars for DDP and hybrid at each batch size: compute, exposed communication, and the gain."""
    axes = figure.subplots()
    width, places = 0.38, range(len(rows))
    pairs = (("DDP", "//", [row.ddp for row in rows]), ("hybrid", "", [row.hybrid for row in rows]))
    for side, (name, hatch, times) in zip((-0.5, 0.5), pairs, strict=True):
        at = [place + side * width for place in places]
        compute, exposed = [t.compute_s for t in times], [max(0.0, t.exposed_s) for t in times]
        axes.bar(at, compute, 0.95 * width, color=COMPUTE_COLOUR, label="compute" if side < 0 else None)
        axes.bar(
            at, exposed, 0.95 * width, bottom=compute, color=EXPOSED_COLOUR, hatch=hatch, edgecolor="white",
            label=f"exposed under {name}",
        )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        top = (place + width / 2, max(row.hybrid.step_s, row.hybrid.compute_s))
        axes.annotate(f"{-row.gain:+.0%}", top, xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(places, [str(row.batch) for row in rows])
    axes.set(xlabel="batch a rank", ylabel="seconds a step")
    finish(axes, _title(rows), figure)


def _title(rows: Sequence[BatchRow]) -> str:
    return f"{setting(rows[0].hybrid)}, bf16"
