"""Sentences about a prediction: what ``auto`` would take, what the inputs are, and other step times of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imagenet_fast.plan.prediction import MODEL_ERROR, Planned, Situation, rivals
from imagenet_fast.recipe.sync_config import Sync


def verdict(rows: Sequence[Planned]) -> str:
    """Return what ``auto`` would take on the GPUs of ``rows``, or that there is no clear winner."""
    best = next((row for row in rows if row.chosen), None)
    if best is None:
        return "auto takes exact engines of ours only, and none was asked for"
    name = f"{best.engine} {best.wire}"
    if others := rivals(rows):
        near = f"within {MODEL_ERROR:.0%} of it under the same inputs"
        return f"no clear winner: auto would take {name}, and {', '.join(others)} come{'s' * (len(others) == 1)} {near}"
    return f"auto would take {name}"


def inputs(situation: Situation) -> Iterator[str]:
    """Yield each input with its kind: measured, published, fitted or assumed."""
    cluster, kinds = situation.cluster, situation.cluster.kinds
    nic, inside = cluster.nic, cluster.inside

    def said(key: str, value: object) -> str:
        return f"{key} {'unknown' if value is None else value} ({kinds.get(key, 'assumed')})"

    yield f"cluster: {cluster.source}"
    yield ", ".join([
        said("nodes", cluster.nodes), said("nic.gbit", nic.gbit), said("nic.count", nic.count),
        said("nic.efficiency", list(nic.efficiency)), said("nic.latency_us", nic.latency_us),
    ])  # fmt: skip
    yield ", ".join([
        said("inside.gb_per_s", inside.gb_per_s), said("inside.latency_us", inside.latency_us),
        said("stragglers.sigma", list(cluster.stragglers.sigma)),
        said("input.images_per_s", cluster.input.images_per_s),
    ])  # fmt: skip
    for compute in situation.device.compute(situation.recipe.model.kind):
        yield (
            f"device {situation.device.name}: {compute.c0:g} + {compute.c1:.4g} x batch ms a step of "
            f"{situation.recipe.model.kind} ({compute.kind}: {compute.source})"
        )


def other_computes(situation: Situation, engines: Sequence[Sync], gpus: int) -> Iterator[str]:
    """Yield the efficiencies with each further step time of the device."""
    for compute in situation.device.compute(situation.recipe.model.kind)[1:]:
        rows = situation.rows(engines, gpus, compute=compute)
        shares = ", ".join(f"{row.engine} {row.wire} {row.efficiency:.0%}" for row in rows)
        yield f"with {1e3 * rows[0].compute_s:.1f} ms a step ({compute.kind}: {compute.source}): {shares}"
