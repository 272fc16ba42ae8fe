"""Sentences about a prediction: what ``auto`` would take, the job, what to beware of, and what the inputs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import get_args

from imagenet_fast.plan.cluster import Cluster, Shown
from imagenet_fast.plan.devices import Device
from imagenet_fast.plan.prediction import MODEL_ERROR, Planned, Situation, training_images
from imagenet_fast.recipe.batching import explain
from imagenet_fast.recipe.schema import Recipe

ACTIVATION_MB = {"alexnet": 3.0, "alexnet_bn": 4.0, "resnet18": 11.0, "resnet50": 57.0}
"""Megabytes kept for backward by an image of 224 pixels in 16 bits.

ResNet-50's and AlexNet-BN's were counted from the tensors that autograd saves; the others are estimates.
"""
JPEG_BYTES = 110_000
"""Bytes of an image of ImageNet's training set: 138 GB over 1.28 million."""
HOST_S = 150e-6
"""Assumed seconds that eager PyTorch's host needs a layer, for forward, backward and update."""
CONTEXT_GB = 1.5
"""Assumed memory of a CUDA context, NCCL and the allocator's rest."""


_cases = attrgetter("efficiency_low", "efficiency", "efficiency_high")


def dry_run(written: Recipe, situation: Situation, row: Planned) -> Iterator[str]:
    """Yield lines about the job that ``row`` predicts: ranks, batch, schedule, memory and input."""
    recipe, batching, device = situation.recipe, situation.batching, situation.cluster.gpu
    images = training_images(recipe)
    per_epoch = images // batching.global_batch
    warmup = round(getattr(recipe.schedule, "warmup_epochs", 0) * per_epoch)
    yield explain(written, recipe, batching)
    yield (
        f"global batch {batching.global_batch}, {per_epoch} steps an epoch, {row.steps} steps in {recipe.epochs} "
        f"epochs; {images - per_epoch * batching.global_batch} of {images} images are left out of each epoch"
    )
    yield (
        f"{recipe.schedule.kind} schedule: {recipe.optim.kind} to a rate of {recipe.optim.lr:.4g} over {warmup} steps, "
        f"then down over {max(0, row.steps - warmup)}"
    )
    held = "" if device.memory_gb is None else f" of {device.memory_gb:g} GB"
    yield (
        f"memory a GPU: about {needed_gb(recipe, device, batching.micro_batch):.1f} GB{held} for "
        f"{batching.micro_batch} images of {recipe.model.kind} (weights, gradients and momentum in fp32, messages, "
        f"activations in {16 * _wide(recipe)} bits)"
    )
    rate = situation.node_images / row.step_s
    yield (
        f"input: {rate:,.0f} images/s a node, {rate * JPEG_BYTES / 1e9:.2f} GB/s of JPEGs of {JPEG_BYTES // 1000} kB "
        "(published mean); `bench data` shows what a node's loader gives"
    )
    if recipe.target_top1 is not None:
        yield f"top-1 of {recipe.target_top1:g} % is assumed to be reached: no prediction is made of accuracy"


def needed_gb(recipe: Recipe, device: Device, micro_batch: int) -> float:
    """Return the gigabytes of a GPU's memory that training on ``micro_batch`` images at once needs, about."""
    elements = device.layers(recipe.model.kind).elements * device.scale
    state = elements * (4 + 4 + 4 + 2)
    area = (max(recipe.data.training_sizes) / 224) ** 2
    return (state + _wide(recipe) * area * micro_batch * ACTIVATION_MB[recipe.model.kind] * 1e6) / 1e9 + CONTEXT_GB


def _wide(recipe: Recipe) -> int:
    """Return the size of an activation, in units of 16 bits."""
    return 1 if recipe.precision.kind in ("bf16", "fp16") else 2


def warnings(situation: Situation, row: Planned) -> Iterator[str]:
    """Yield what to beware of."""
    recipe, device, micro_batch = situation.recipe, situation.cluster.gpu, situation.batching.micro_batch
    given, rate = situation.cluster.input.images_per_s, situation.node_images / row.step_s
    if given is None:
        yield "input.images_per_s of the cluster is unknown, so a slow input is not seen; measure it by `bench data`"
    elif given < rate:
        yield (
            f"the input gives {given:,.0f} images/s a node, and {rate:,.0f} are needed: steps would take "
            f"{rate / given:.1f} times as long; shrink images by `data prepare --resize`, or decode them by "
            "`--format pixels`"
        )
    if device.on_gpu and device.profile is None and _wide(recipe) > 1:
        yield (
            f"the step times of {device.name} are of 16 bits, so with precision.kind {recipe.precision.kind} a step "
            "takes longer"
        )
    layers, micro_s = len(device.layers(recipe.model.kind).layers), situation.micro_s
    if device.on_gpu and layers * HOST_S > micro_s:
        yield (
            f"a micro-batch of {micro_batch} computes {1e3 * micro_s:.1f} ms, and eager PyTorch's host needs about "
            f"{1e3 * layers * HOST_S:.0f} ms (assumed, {layers} layers): "
            "the host sets the pace; compile, or take more images a GPU"
        )
    if device.memory_gb is not None and (needed := needed_gb(recipe, device, micro_batch)) > device.memory_gb:
        yield f"{needed:.1f} GB do not fit into {device.memory_gb:g} GB; --set micro_batch={max(1, micro_batch // 2)}"


def verdict(rows: Sequence[Planned]) -> str:
    """Return what ``auto`` would take on the GPUs of ``rows``, or that there is no clear winner.

    What is not known of a cluster is the same for all engines: its NICs and its stragglers. So engines are compared in
    each of three cases, with low, used and high inputs for both, and not by whether their bands overlap.
    """
    best = next((row for row in rows if row.chosen), None)
    if best is None:
        return "auto takes exact engines of ours only, and none was asked for"
    others = [
        f"{row.engine} {row.wire}" for row in rows
        if row is not best and row.ours
        and any(own > (1 - MODEL_ERROR) * its for own, its in zip(_cases(row), _cases(best), strict=True))
    ]  # fmt: skip
    taken = f"auto would take {best.engine} {best.wire}"
    if not others:
        return taken
    near = f"within {MODEL_ERROR:.0%} of it under the same inputs"
    return f"no clear winner: {taken}, and {', '.join(others)} come{'s' * (len(others) == 1)} {near}"


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
        f"device {cluster.gpu.name}: {compute.c0:g} + {compute.c1:.4g} x batch ms a step of {model} "
        f"({compute.kind}: {compute.source})"
    )
