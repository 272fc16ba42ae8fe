"""What hiding communication gains at each batch size: the table of the hybrid all-reduce thesis.

Compute grows with the batch and communication does not, so a small batch has more to send than it has time to hide it
in, and a large one has little to hide. After Kim et al. (doi 10.3745/KTCCS.2021.10.7.191), whose gain is up to 33 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from imagenet_fast.bench.engine_times import bench_sync
from imagenet_fast.cost.profile import Profile
from imagenet_fast.recipe.engine_settings import DdpSync, HybridSync, Sync
from imagenet_fast.record.tables import compact_table


@dataclass(frozen=True)
class BatchRow:
    """Of one batch size, seconds a step: medians over the rounds."""

    model: str
    hosts: int
    rate: str | None
    scale: int
    batch: int
    compute_s: float
    ddp_s: float
    ddp_exposed_s: float
    hybrid_s: float
    hybrid_exposed_s: float
    gain: float
    """The share of DDP's step that hybrid saves."""
    predicted_s: float
    """Of hybrid, by the cost model."""
    limit_s: float
    """Of hybrid."""


def bench_batches(
    profile: Profile,
    batches: Sequence[int],
    hosts: int,
    ranks_per_host: int,
    rate: str | None,
    scale: int,
    rounds: int,
    steps: int,
) -> list[BatchRow]:
    """DDP and hybrid in 16 bits at each of ``batches``, where the largest computes as long as ``profile`` says and the
    others in proportion. Raises UserError as :func:`bench_sync` does."""
    rows = []
    for batch in batches:
        at = profile.lasting(profile.compute_s * batch / max(batches))
        engines: list[Sync] = [DdpSync(wire="bf16"), HybridSync(wire="bf16")]
        ddp, hybrid = bench_sync(at, engines, hosts, ranks_per_host, rate, scale, rounds, steps)
        rows.append(
            BatchRow(
                profile.model, hosts, rate, scale, batch, ddp.compute_s, ddp.step_s, ddp.exposed_s, hybrid.step_s,
                hybrid.exposed_s, 1 - hybrid.step_s / ddp.step_s, hybrid.predicted_s, hybrid.limit_s,
            )
        )  # fmt: skip
    return rows


def batch_table(rows: Sequence[BatchRow]) -> Table:
    """One row a batch size; ``+`` is exposed communication."""
    table = compact_table(
        (),
        ("batch", "compute", "ddp", "+", "hybrid", "+", "gain", "x limit", "predicted"),
        (
            (
                str(row.batch), f"{row.compute_s:.3f}", f"{row.ddp_s:.3f}", f"{row.ddp_exposed_s:.3f}",
                f"{row.hybrid_s:.3f}", f"{row.hybrid_exposed_s:.3f}", f"{row.gain:.1%}",
                f"{row.hybrid_s / row.limit_s:.3f}", f"{row.predicted_s:.3f}",
            )
            for row in rows
        ),
    )  # fmt: skip
    table.title = _title(rows[0])
    return table


def draw_batches(rows: Sequence[BatchRow], figure: Any) -> None:
    """Two bars a batch size, DDP's and hybrid's: compute, what is exposed beyond it, and the gain."""
    axes = figure.subplots()
    width = 0.38
    for number, row in enumerate(rows):
        for side, exposed, hatch in ((-1, row.ddp_exposed_s, "//"), (1, row.hybrid_exposed_s, "")):
            place = number + side * width / 2
            name = "hybrid" if side > 0 else "DDP"
            first = number == 0
            axes.bar(
                place, row.compute_s, width * 0.95, color="#4c72b0", label="compute" if first and side < 0 else None
            )
            axes.bar(
                place, max(0.0, exposed), width * 0.95, bottom=row.compute_s, color="#dd8452", hatch=hatch,
                edgecolor="white", label=f"exposed under {name}" if first else None,
            )  # fmt: skip
        top = (number + width / 2, row.compute_s + max(0.0, row.hybrid_exposed_s))
        axes.annotate(f"−{row.gain:.0%}", top, xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(rows)), [str(row.batch) for row in rows])
    axes.set(xlabel="batch a rank", ylabel="seconds a step")
    axes.set_title(_title(rows[0]), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _title(row: BatchRow) -> str:
    scale = f"1/{row.scale} of {row.model}" if row.scale > 1 else row.model
    return f"{scale}, {row.hosts} hosts, {'loopback' if row.rate is None else row.rate}, bf16"
