"""Published and measured rows beside the model: none tuned to fit, none hidden. See ``clusters/published.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.cost_model.layer_profile import load_profile
from imagenet_fast.metrics.rows import Row, column
from imagenet_fast.plan.cluster import cluster_folder, load_cluster
from imagenet_fast.plan.devices import DEVICES, Compute
from imagenet_fast.plan.network import StatedNetwork
from imagenet_fast.plan.prediction import Step, label, planned_engines, predict_step
from imagenet_fast.recipe.load import parse_engines
from imagenet_fast.recipe.sync_config import Sync

TCP_PAYLOAD = 1448 / 1514
"""Share of a frame that TCP leaves for data."""
GLOO_PAIR_S = 0.25e-3
"""Seconds of gloo's latency between shaped hosts for each rank and peer of it: 3 ms with four ranks.

All ranks share two cores, and each sends to each other in both halves of an all-reduce. So what the cores do for an
all-reduce, however short, grows with the number of ranks times the number of their peers.
"""
LARGE_MISS = 0.10
"""Error from which a row has a sentence of what it leaves unexplained."""


@dataclass(frozen=True)
class Compared(Row):
    """A published or measured step beside its prediction."""

    name: str = field(metadata=column("row"))
    """Who, or what was measured."""
    gpus: int = field(metadata=column("GPUs"))
    """GPUs, or ranks."""
    batch: int | None = field(metadata=column("batch"))
    """Images of one GPU in a step."""
    engine: str = field(metadata=column("engine"))
    """Engine and wire dtype that stand for theirs."""
    reported: float = field(metadata=column("reported", "ms", ".2f"))
    """Seconds of a step, as reported or measured."""
    predicted: float = field(metadata=column("predicted", "ms", ".2f"))
    """Seconds of a step by the model."""
    error: float = field(metadata=column("error", form="+.1%"))
    """``predicted`` over ``reported``, less 1."""
    calibrated_on: str = field(metadata=column("calibrated on"))
    """``itself`` where the compute was fitted to this row; ``circular`` where it follows from the paper's own
    speed-up, so that the row cannot test the model; ``nothing`` for a nominal link; else ``held out``."""
    ours: str = field(metadata=column("ours"))
    """The fastest exact engine of ours at their batch, and its wire dtype."""
    ours_s: float = field(metadata=column("ours", "ms", ".2f"))
    """Seconds of a step with it."""
    left: str
    """The part that the model leaves unexplained, where it misses by over 10 %."""


@dataclass(frozen=True)
class Validated(Row):
    """An engine's step measured between shaped hosts, beside its predictions."""

    engine: str = field(metadata=column("engine"))
    wire: str = field(metadata=column("wire"))
    nominal_s: float = field(metadata=column("nominal link", "s", ".3f"))
    """Seconds predicted from the nominal rate of the links."""
    fitted_s: float | None = field(metadata=column("fitted link", "s", ".3f"))
    """Seconds predicted from the measured costs of the link."""
    measured_s: float = field(metadata=column("measured", "s", ".3f"))
    error: float = field(metadata=column("nominal's error", form="+.1%"))
    """``nominal_s`` over ``measured_s``, less 1."""


@dataclass(frozen=True)
class Published:
    """A published result; ``clusters/published.toml`` says what its fields are."""

    name: str
    cluster: str
    gpus: int
    batch: int
    step_ms: float
    compute: Compute
    engine: Sync
    model: str = "resnet50"
    calibrated_on: str = "held out"
    gbit: float | None = None
    minutes: float | None = None
    left: str = ""


@dataclass(frozen=True)
class Shaped:
    """Steps that `bench sync` measured, or will, between hosts in network namespaces."""

    profile: str
    scale: int
    hosts: int
    mbit: float
    compute_s: float
    """Measured seconds of a step without synchronisation."""
    seconds: Sequence[tuple[Sync, float]] = ()
    """Engines, and measured seconds."""
    ranks_per_host: int = 1


def _tables() -> dict[str, Any]:
    return tomllib.loads((cluster_folder() / "published.toml").read_text(encoding="utf-8"))


@cache
def published() -> list[Published]:
    """Return the published results."""
    tables, found = _tables(), []
    engines = {name: TypeAdapter(Sync).validate_python(table) for name, table in tables["engines"].items()}
    for row in tables["published"]:
        model, times = row.get("model", "resnet50"), row["compute"]
        compute = (
            DEVICES[times].computes[model] if isinstance(times, str) else Compute(times[0], times[1], "fitted", "")
        )
        found.append(Published(**row | {"compute": compute, "engine": engines[row.get("engine", "fused")]}))
    return found


@cache
def shaped() -> list[Shaped]:
    """Return the steps measured between shaped hosts."""
    found = []
    for row in _tables()["shaped"]:
        engines = parse_engines(",".join(row["seconds"]), "bf16")
        found.append(Shaped(**row | {"seconds": [*zip(engines, row["seconds"].values(), strict=True)]}))
    return found


@cache
def all_rows() -> list[Compared]:
    """Return the published rows, then the measured ones."""
    return [*map(published_row, published()), *(row for steps in shaped() for row in shaped_rows(steps))]


def published_row(row: Published) -> Compared:
    """Predict a published row on its cluster."""
    cluster = load_cluster(row.cluster)
    network = (cluster if row.gbit is None else cluster.with_nics(row.gbit)).network(row.gpus)
    step = Step(DEVICES["v100"].layers(row.model), row.batch, 1, row.compute.seconds(row.batch))
    predicted = predict_step(row.engine, step, network).step_s
    engines = planned_engines("ring,lazy,hybrid,dear", "bf16")
    ours = {engine.kind: predict_step(engine, step, network).step_s for engine in engines}
    best = min(ours, key=ours.__getitem__)
    reported = row.step_ms / 1e3
    error = predicted / reported - 1
    return Compared(
        row.name, row.gpus, row.batch, f"{label(row.engine)} {row.engine.wire}", reported, predicted, error,
        row.calibrated_on, f"{best} bf16", ours[best], row.left if abs(error) > LARGE_MISS else "",
    )  # fmt: skip


def shaped_rows(steps: Shaped) -> list[Compared]:
    """Predict what was measured between shaped hosts, from their nominal link."""
    rows = []
    for engine, measured in steps.seconds:
        predicted = shaped_step_s(steps, engine)
        rows.append(
            Compared(
                f"{steps.profile}/{steps.scale}, {steps.hosts} x {steps.mbit:g} Mbit/s, {steps.compute_s:g} s",
                steps.hosts * steps.ranks_per_host, None, f"{engine.kind} {engine.wire}", measured, predicted,
                predicted / measured - 1, "nothing", "", predicted, "",
            )
        )  # fmt: skip
    return rows


def shaped_step_s(steps: Shaped, engine: Sync) -> float:
    """Return the predicted seconds of a step between shaped hosts, by the nominal rate of their links."""
    profile = load_profile(steps.profile).downscaled(steps.scale)
    layout = RankLayout((steps.ranks_per_host,) * steps.hosts, on_gpu=False)
    latency_s = GLOO_PAIR_S * layout.size * (layout.size - 1)
    network = StatedNetwork(layout, TCP_PAYLOAD * steps.mbit * 1e6 / 8, between_s=latency_s)
    return predict_step(engine, Step(profile, 1, 1, steps.compute_s), network).step_s


def summary(rows: Sequence[Compared]) -> list[str]:
    """Return mean and worst error of the measured rows, and of MLPerf's systems by size, those held out apart."""
    measured = [row for row in rows if row.calibrated_on == "nothing"]
    held_out = [row for row in rows if row.name.startswith("MLPerf") and row.calibrated_on == "held out"]
    large = [row for row in held_out if row.gpus >= 512]
    return [
        _errors("measured between shaped hosts, nothing fitted", measured),
        _errors("MLPerf systems of 512 GPUs and more, held out", large),
        _errors("of these, without v0.5", [row for row in large if not row.name.startswith("MLPerf v0.5")]),
        _errors("MLPerf systems of 1 to 64 GPUs, held out", [row for row in held_out if row.gpus <= 64]),
    ]


def _errors(name: str, rows: Iterable[Compared]) -> str:
    errors = [abs(row.error) for row in rows]
    return f"{name}: {len(errors)} rows, mean error {fmean(errors):.1%}, worst {max(errors):.1%}"
