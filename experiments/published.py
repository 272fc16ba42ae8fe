"""Measure here what papers compare, on a shaped network.

python -m experiments.published ladder|batches [--model NAME|FILE] [--nodes N] [--rate RATE] [--scale N] [--compute S]

The ladder shows the gain of each technique of GradientFlow (arXiv 1902.06855), added one by one, and of our own.

The table of the hybrid all-reduce thesis compares hybrid with DDP at several batch sizes. Compute time grows with the
batch and communication time does not. With a small batch, communication takes longer than the compute that could hide
it; with a large batch there is little to hide. After Kim et al. (doi 10.3745/KTCCS.2021.10.7.191), whose gain is up to
33 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import typer

from imagenet_fast.bench.engines import EngineTime, bench_sync
from imagenet_fast.bench.plots import draw_bars
from imagenet_fast.cli import options as opt
from imagenet_fast.cli.app import App
from imagenet_fast.cost_model.layer_profile import Profile, load_profile
from imagenet_fast.errors import UserError, exit_with_error
from imagenet_fast.metrics.tables import Row, column, columns_of
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.recipe.sync_config import AllReduceSync, DdpSync, HybridSync, LazySync, RingSync, SparseSync, Sync
from imagenet_fast.units import whole_numbers

Measure = Callable[[Profile, Sequence[Sync]], list[EngineTime]]
"""``bench_sync`` on a given network."""

_LADDER: tuple[tuple[str, Sync, int | None], ...] = (
    ("an all-reduce a layer, fp32", AllReduceSync(), None),
    ("+ ring", AllReduceSync(collective="ring"), 0),
    ("+ 16 bits", AllReduceSync(collective="ring", wire="bf16"), 1),
    ("+ overlap with backward", RingSync(wire="bf16", bucket_mb=0), 2),
    ("+ lazy (fused)", LazySync(wire="bf16"), 3),
    ("+ sparse (an eighth)", SparseSync(wire="bf16", dense_epochs=0.0, ramp_epochs=0.0), 4),
    ("hybrid instead of sparse", HybridSync(wire="bf16"), 4),
    ("+ 8 bits (int8)", HybridSync(wire="int8"), 6),
)
"""Label, engine, and index of the step that this one is added to (None for the first)."""


@dataclass(frozen=True)
class Rung(Row):
    """One step of the ladder: a technique added to another step."""

    step: str = field(metadata=column("step"))
    """The technique that this step adds, or puts ``instead of`` another."""
    gain: float | None = field(metadata=column("gain", form=".2f"))
    """Speedup over the step it is added to; None for the first step."""
    in_all: float = field(metadata=column("in all", form=".2f"))
    """Speedup over the first step."""
    time: EngineTime = field(metadata=columns_of("step_s", "ratio_to_limit", "predicted_s"))
    """Its step time, as `bench sync` measures it."""

    @property
    def title(self) -> str:
        """Describe what was replayed and where."""
        return f"{self.time.title}: compute {self.time.compute_s:.3f} s"


@dataclass(frozen=True)
class BatchRow(Row):
    """Times of DDP and hybrid at one batch size, with bf16 on the wire."""

    batch: int = field(metadata=column("batch"))
    """Images of a rank."""
    gain: float = field(metadata=column("gain", form=".1%"))
    """Share of DDP's step time that hybrid saves."""
    ddp: EngineTime = field(metadata=columns_of("compute_s", "step_s", "exposed_s", heading="ddp"))
    """DDP's step, as `bench sync` measures it."""
    hybrid: EngineTime = field(
        metadata=columns_of("step_s", "exposed_s", "ratio_to_limit", "predicted_s", heading="hybrid")
    )
    """Hybrid's step, likewise."""

    @property
    def title(self) -> str:
        """Describe what was replayed and where."""
        return f"{self.hybrid.title}, bf16"


def bench_ladder(profile: Profile, measure: Measure) -> list[Rung]:
    """Measure every step of the ladder.

    Raise what ``measure`` raises.
    """
    times = measure(profile, [engine for _, engine, _ in _LADDER])
    return [
        Rung(step, None if below is None else times[below].step_s / time.step_s, times[0].step_s / time.step_s, time)
        for (step, _, below), time in zip(_LADDER, times, strict=False)  # the DDP rows at the end are left out
    ]


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
        at = profile.scaled_to(profile.compute_s * batch / max(batches))
        ddp, hybrid = measure(at, [DdpSync(wire="bf16"), HybridSync(wire="bf16")])
        rows.append(BatchRow(batch, 1 - hybrid.step_s / ddp.step_s, ddp, hybrid))
    return rows


def draw_ladder(rows: Sequence[Rung], figure: Any) -> None:
    """Draw a bar for each step, with its gain."""
    gains = ["" if row.gain is None else f", {row.gain:.2f} times" for row in rows]
    bars = [(row.step, f"{row.time.step_s:.2f} s{gain}", row.time) for row, gain in zip(rows, gains, strict=True)]
    draw_bars(bars, rows[0].title, figure)


def draw_batches(rows: Sequence[BatchRow], figure: Any) -> None:
    """Draw two bars for each batch size, with what hybrid gains."""
    bars = []
    for row in rows:
        bars.append((f"batch {row.batch}, ddp", f"{row.ddp.step_s:.2f} s", row.ddp))
        bars.append((f"batch {row.batch}, hybrid", f"{row.hybrid.step_s:.2f} s, {-row.gain:+.0%}", row.hybrid))
    draw_bars(bars, rows[0].title, figure)


app = App(pretty_exceptions_enable=False)


@app.command()
def published(
    what: Annotated[Literal["ladder", "batches"], typer.Argument()],
    batches: opt.Numbers[str | None] = None,
    model: str = "alexnet",
    nodes: opt.Count[int] = 4,
    nproc: opt.Count[int] = 1,
    rate: opt.Rate[str | None] = None,
    scale: opt.Count[int] = 1,
    compute: opt.Seconds[float | None] = None,
    rounds: opt.Count[int] = 5,
    steps: opt.Count[int] = 2,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Measure here what papers compare; options are those of `bench sync`, and --batches 16,32,64,128 of a rank."""
    if batches is not None and what == "ladder":
        raise UserError(f"--batches {batches} is of `batches`; leave it out")
    profile, usual = load_profile(model).scaled_to(compute), "16,32,64,128"
    on = partial(bench_sync, lab=Lab(nodes, nproc, rate), scale=scale, rounds=rounds, steps=steps)
    if what == "ladder":
        opt.show_rows(bench_ladder(profile, on), json_file, draw_ladder, png)
    else:
        counts = whole_numbers("--batches", usual if batches is None else batches, usual)
        opt.show_rows(bench_batches(profile, counts, on), json_file, draw_batches, png)


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        exit_with_error(str(error))
