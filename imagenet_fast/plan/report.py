"""Sentences about a prediction: what ``auto`` would take, the job, what to beware of, and what the inputs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import get_args

from imagenet_fast.plan.cluster import Cluster, Shown
from imagenet_fast.plan.devices import MODELS, Device
from imagenet_fast.plan.prediction import Planned, Situation, training_images
from imagenet_fast.recipe.batching import explain
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.schema import Recipe

CONTEXT_GB = 1.5
"""Assumed memory of a CUDA context, NCCL and the allocator's rest."""


def dry_run(written: Recipe, situation: Situation, row: Planned) -> Iterator[str]:
    """Yield lines about the job that ``row`` predicts: ranks, batch, memory and input."""
    recipe, batching, device = situation.recipe, situation.batching, situation.cluster.gpu
    images = training_images(recipe)
    per_epoch = images // batching.global_batch
    yield explain(written, recipe, batching)
    yield (
        f"global batch {batching.global_batch}, {per_epoch} steps an epoch, {row.steps} steps in {recipe.epochs} "
        f"epochs; {images - per_epoch * batching.global_batch} of {images} images are left out of each epoch"
    )
    held = "" if device.memory_gb is None else f" of {device.memory_gb:g} GB"
    yield (
        f"memory a GPU: about {needed_gb(recipe, device, batching.micro_batch):.1f} GB{held} for "
        f"{batching.micro_batch} images of {recipe.model.kind} (weights, gradients and momentum in fp32, messages, "
        f"activations in {16 * _wide(recipe)} bits)"
    )
    rate = situation.node_images / row.step_s
    yield f"input: {rate:,.0f} images/s a node; `bench data` shows what its loader gives"
    if recipe.target_top1 is not None:
        yield f"top-1 of {recipe.target_top1:g} % is assumed to be reached: no prediction is made of accuracy"


def needed_gb(recipe: Recipe, device: Device, micro_batch: int) -> float:
    """Return the gigabytes of a GPU's memory that ``micro_batch`` images at once need, about, with resident ones."""
    elements = device.layers(recipe.model.kind).elements * device.scale
    state = elements * (4 + 4 + 4 + 2)
    if isinstance(recipe.data, ImageData) and recipe.data.resident is True:
        state += 4 * recipe.data.resize**2 * training_images(recipe)
    images = (max(recipe.data.training_sizes) / 224) ** 2 * micro_batch * _wide(recipe)
    return (state + images * MODELS[recipe.model.kind].activation_mb * 1e6) / 1e9 + CONTEXT_GB


def _wide(recipe: Recipe) -> int:
    """Return the size of an activation, in units of 16 bits."""
    return 1 if recipe.precision.kind in ("bf16", "fp16") else 2


def warnings(situation: Situation, row: Planned) -> Iterator[str]:
    """Yield what to beware of."""
    recipe, device, micro_batch = situation.recipe, situation.cluster.gpu, situation.batching.micro_batch
    loading_s, images = situation.loading_s, situation.node_images
    if not loading_s:
        yield "what the loader feeds a node is unknown, so a slow input is not seen; measure it by `bench data`"
    elif loading_s > row.step_s:
        yield (
            f"the input gives {images / loading_s:,.0f} images/s a node, and {images / row.step_s:,.0f} are needed, so "
            "training waits; shrink images by `data prepare --resize`, or decode them by `--format pixels`"
        )
    if device.on_gpu and device.profile is None and _wide(recipe) > 1:
        kind = recipe.precision.kind
        yield f"step times of {device.name} are of 16 bits, so with precision.kind {kind} a step takes longer"
    if situation.host_s > situation.model_error * row.step_s:
        yield (
            f"a micro-batch of {micro_batch} computes in less than the {situation.compute.host:.1f} ms that the host "
            "needs to launch it: the host sets the pace; take more images a GPU"
        )
    if device.memory_gb is not None and (needed := needed_gb(recipe, device, micro_batch)) > device.memory_gb:
        yield f"{needed:.1f} GB do not fit into {device.memory_gb:g} GB; --set micro_batch={max(1, micro_batch // 2)}"


def verdict(rows: Sequence[Planned], error: float) -> str:
    """Return what ``auto`` would take on the GPUs of ``rows``, and what comes within the model's ``error`` of it."""
    best = next((row for row in rows if row.chosen), None)
    if best is None:
        return "auto takes exact engines of ours only, and none was asked for"
    near = [
        f"{row.engine} {row.wire}" for row in rows
        if row.ours and row is not best and (1 - error) * row.step_s < best.step_s
    ]  # fmt: skip
    taken = f"auto would take {best.engine} {best.wire}"
    if not near:
        return taken
    return f"no clear winner: {taken}, and {', '.join(near)} come{'s' * (len(near) == 1)} within {error:.0%} of it"


def inputs(cluster: Cluster, model: str) -> Iterator[str]:
    """Yield each input with its kind: measured, published, fitted or assumed."""
    yield f"cluster: {cluster.source}"
    yield ", ".join(
        f"{key} {'unknown' if value is None else value} ({cluster.kinds.get(key, 'assumed')})"
        for key in get_args(Shown)
        for value in [attrgetter(key)(cluster)]
    )
    compute = cluster.gpu.compute(model)
    yield (
        f"device {cluster.gpu.name}: {compute.c0:.3g} + {compute.c1:.4g} x batch ms a step of {model}"
        f"{f', at least {compute.host:.3g} by the host' if compute.host else ''} "
        f"({compute.kind}: {compute.source})"
    )
