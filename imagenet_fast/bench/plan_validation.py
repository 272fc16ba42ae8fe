"""Measure engines between shaped hosts beside what `plan` predicts for them, from the nominal and the measured link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.cost_model.layer_profile import load_profile
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.prediction import predict_step
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.recipe.sync_table import Wire

_BATCH = 128  # of which `test-network` tells the compute time


@dataclass(frozen=True)
class Validated(Row):
    """An engine's step measured between shaped hosts, beside its predictions."""

    engine: str = field(metadata=column("engine"))
    """Name of the engine."""
    wire: Wire = field(metadata=column("wire"))
    """Wire dtype."""
    nominal_s: float = field(metadata=column("nominal link", "s", ".3f"))
    """Seconds predicted from the nominal rate of the links."""
    fitted_s: float = field(metadata=column("fitted link", "s", ".3f"))
    """Seconds predicted from the measured costs of the link."""
    measured_s: float = field(metadata=column("measured", "s", ".3f"))
    """Measured seconds."""
    error: float = field(metadata=column("nominal's error", form="+.1%"))
    """``nominal_s`` over ``measured_s``, less 1."""


def validate(model: str, engines: Sequence[Sync]) -> list[Validated]:
    """Measure a step of ``model`` with each engine on `test-network`. Raise what ``bench_sync`` raises."""
    cluster = load_cluster("test-network")
    device, nominal = cluster.gpu, cluster.network(cluster.nodes)
    compute_s, layers = device.compute(model).seconds(_BATCH), device.layers(model)
    lab = Lab(cluster.nodes, cluster.gpus_per_node, f"{cluster.nic.node_gbit}gbit")
    times = bench_sync(load_profile(layers.model).scaled_to(compute_s), engines, lab, device.scale, rounds=2, steps=2)
    rows = []
    for settings, time in zip(engines, times, strict=False):  # ddp is measured, too, though it was not asked for
        nominal_s = predict_step(settings, layers.scaled_to(time.compute_s), nominal).step_s
        error = nominal_s / time.step_s - 1
        rows.append(Validated(settings.kind, settings.wire, nominal_s, time.predicted_s, time.step_s, error))
    return rows
