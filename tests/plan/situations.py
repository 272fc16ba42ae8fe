"""Situations to predict."""

from __future__ import annotations

from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.devices import find_device
from imagenet_fast.plan.prediction import Planned, Scaling, Situation, planned_engines
from imagenet_fast.recipe.load import find_recipe, load_recipe


def situation(recipe: str = "alexnet-512gpu", cluster: str = "gradientflow-v", scaling: Scaling = "weak") -> Situation:
    machine = load_cluster(cluster)
    device = find_device(machine.device, machine.device_batch)
    return Situation(load_recipe(find_recipe(recipe)), machine, device, scaling)


def by_engine(
    gpus: int, gbit: float | None = None, engines: str | None = None, of: Situation | None = None
) -> dict[str, Planned]:
    rows = (of or situation()).rows(planned_engines(engines, "bf16"), gpus, gbit)
    return {f"{row.engine} {row.wire}": row for row in rows}
