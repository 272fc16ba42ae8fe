"""Show predictions as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from imagenet_fast.metrics.tables import NOTHING, compact_table
from imagenet_fast.plan.fastest import Way
from imagenet_fast.plan.prediction import Planned
from imagenet_fast.plan.rows import Row
from imagenet_fast.units import three_digits

_MOST_WAYS = 15


def duration(seconds: float) -> str:
    """Return a time as text, in s, min or h."""
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def plan_table(rows: Sequence[Planned]) -> Table:
    """Build a table with one row per engine and point of a sweep; ``*`` marks what ``auto`` would take.

    ``+`` is exposed communication, ``MB`` goes through the NICs of a node, ``eff.`` is against one GPU with its band.
    """
    return compact_table(
        ("engine",),
        ("GPUs", "Gbit/s", "ms", "compute", "+", "MB", "images/s", "eff.", "band", "steps", "train"),
        (
            (
                f"{row.engine} {row.wire}{' *' if row.chosen else ''}", str(row.gpus),
                NOTHING if row.nic_gbit is None else f"{row.nic_gbit:g}", f"{1e3 * row.step_s:.2f}",
                f"{1e3 * row.compute_s:.2f}", f"{1e3 * row.exposed_s:.2f}", f"{row.nic_bytes / 1e6:.1f}",
                f"{row.images_per_s:,.0f}", f"{row.efficiency:.1%}",
                f"{100 * row.efficiency_low:.0f}-{100 * row.efficiency_high:.0f}",
                str(row.steps), duration(row.train_s),
            )
            for row in rows
        ),
    )  # fmt: skip


def rows_table(rows: Sequence[Row]) -> Table:
    """Build a table of published or measured rows beside the model; times in milliseconds a step."""
    return compact_table(
        ("row", "engine"),
        ("GPUs", "batch", "reported", "predicted", "error", "calibrated", "ours", "ms"),
        (
            (
                row.name, row.engine, str(row.gpus), NOTHING if row.batch is None else str(row.batch),
                f"{1e3 * row.reported:.2f}", f"{1e3 * row.predicted:.2f}", f"{row.error:+.1%}", row.calibrated_on,
                row.ours or NOTHING, f"{1e3 * row.ours_s:.2f}" if row.ours else NOTHING,
            )
            for row in rows
        ),
    )  # fmt: skip


def fastest_table(ways: Sequence[Way]) -> Table:
    """Build a table of the best ways to train, 15 at most; ``micro`` is the images that a GPU computes at once."""
    priced = any(way.usd is not None for way in ways)
    return compact_table(
        ("training", "engine", "held back by"),
        ("GPUs", "micro", "epochs", "min", "band", "GPU h", *(["USD"] if priced else []), "images/s a node"),
        (
            (
                way.training, way.engine + ("" if way.exact else ", accuracy not published"), way.held_back_by,
                str(way.gpus), str(way.micro_batch), str(way.epochs), three_digits(way.minutes),
                f"{three_digits(way.least)}-{three_digits(way.most)}", three_digits(way.gpu_hours),
                *([three_digits(way.usd)] if way.usd is not None else []), f"{way.node_images_per_s:,.0f}",
            )
            for way in ways[:_MOST_WAYS]
        ),
    )  # fmt: skip
