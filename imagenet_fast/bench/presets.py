"""Sets of engines for `bench sync` that make the tables of two papers: ``--ladder`` and ``--batches``.

The ladder shows the gain of each technique of GradientFlow (arXiv 1902.06855), added one by one, and of our own.

The table of the hybrid all-reduce thesis compares hybrid with DDP at several batch sizes. Compute time grows with the
batch and communication time does not. With a small batch, communication takes longer than the compute that could hide
it; with a large batch there is little to hide. After Kim et al. (doi 10.3745/KTCCS.2021.10.7.191), whose gain is up to
33 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from imagenet_fast.bench.engines import EngineTime, Measure, Measured
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.recipe.sync_config import DdpSync, HybridSync, LazySync, SparseSync
from imagenet_fast.sync import Engine

_HALF = torch.bfloat16
_STEPS: tuple[tuple[str, Measured, int | None], ...] = (
    (
        "an all-reduce a tensor, fp32",
        ("naive", Engine(torch.float32, "each", bucket_bytes=0, collective="native")),
        None,
    ),
    ("+ ring", ("ring", Engine(torch.float32, "each", bucket_bytes=0, collective="ring")), 0),
    ("+ 16 bits", ("16 bits", Engine(_HALF, "each", bucket_bytes=0, collective="ring")), 1),
    ("+ overlap with backward", ("overlap", Engine(_HALF, "backward", bucket_bytes=0, collective="ring")), 2),
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
        at = profile.scaled_to(profile.compute_s * batch / max(batches))
        ddp, hybrid = measure(at, [DdpSync(wire="bf16"), HybridSync(wire="bf16")])
        rows.append(BatchRow(batch, 1 - hybrid.step_s / ddp.step_s, ddp, hybrid))
    return rows
