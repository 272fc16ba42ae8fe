"""Find the published way to train that reaches its target first on a cluster, or with the fewest GPU hours."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imagenet_fast.errors import UserError
from imagenet_fast.plan.cluster import Cluster
from imagenet_fast.plan.devices import Device
from imagenet_fast.plan.dry_run import needed_gb
from imagenet_fast.plan.prediction import (
    MODEL_ERROR,
    Planned,
    Situation,
    planned_engines,
    training_images,
)
from imagenet_fast.plan.stragglers import straggling
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_recipe, to_toml
from imagenet_fast.recipe.schema import Recipe

FEW_IMAGES = 32
"""Batch norms of fewer images than this are not published to reach 75.9 %: NVIDIA's largest submission has 32."""
EVALUATED = 50_000
"""Images of ImageNet's validation set."""
_WAYS = 4  # numbers of GPUs of a point that are predicted with every engine
_EXACT = "ddp,lazy,hybrid,dear,ring"
_INEXACT = "lazy:int8,hybrid:int8,dear:int8,sparse,powersgd"

HeldBack = Literal["compute", "network", "stragglers", "input", "memory", "batch-norm span"]


@dataclass(frozen=True)
class Point:
    """A published training: its settings as published, and the epochs that it took to the target."""

    name: str
    recipe: Recipe
    epochs: tuple[float, float, float]
    """Mean, fewest and most in its runs."""
    span: int | None
    """Images of which its batch norms took their statistics; None: not known."""
    source: str


@dataclass(frozen=True)
class Way:
    """A point on a number of GPUs with an engine, and the prediction."""

    point: str
    gpus: int
    engine: str
    exact: bool
    """Whether the accuracy of such gradients is the published one; of others it is not published."""
    micro_batch: int
    epochs: int
    """Epochs to the evaluation that shows the target."""
    minutes: float
    """Steps and evaluations."""
    least: float
    """With the better ends of the NICs, stragglers and epochs."""
    most: float
    """With the worse ends."""
    gpu_hours: float
    usd: float | None
    node_images_per_s: float
    """Images that a node's loaders must give."""
    held_back_by: HeldBack
    """What costs most time beyond the GPUs' compute, or has led to fewer GPUs or images a GPU."""


def points(model: Literal["resnet50", "alexnet"]) -> Iterator[Point]:
    """Yield every published training of ``model``."""
    tables = tomllib.loads(Path(__file__).with_name("points.toml").read_text(encoding="utf-8"))
    for table in tables["recipe"]:
        recipe = load_recipe(find_recipe(table["name"]), "lazy")
        if recipe.model.kind.removesuffix("_bn") == model:
            source = f"recipes/{table['name']}.toml cites it"
            yield Point(table["name"], recipe, table["epochs"], None, source)
    if model == "resnet50":
        yield from map(_lars, tables["lars"])


def _lars(table: dict[str, Any]) -> Point:
    batch, version = table["batch"], table.get("version", "4.0")
    settings = {
        "ranks": 1, "global_batch": batch, "epochs": table["length"], "eval_every": 4,
        "first_eval": (math.ceil(table["epochs"][0]) - 1) % 4 + 1, "optim.lr": table["lr"],
        "optim.momentum": table.get("momentum", 0.9), "optim.weight_decay": table["weight_decay"],
        "schedule.warmup_epochs": table["warmup"],
    }  # fmt: skip
    recipe = load_recipe(
        find_recipe("resnet50-512gpu-20k"), "lazy", [f"{key}={value}" for key, value in settings.items()]
    )
    source = f"MLCommons' reference convergence point of batch {batch}, version {version}"
    return Point(f"LARS {batch}", recipe, table["epochs"], table["span"], source)


def ways(found: Sequence[Point], cluster: Cluster, device: Device, most: int, cheapest: bool) -> list[Way]:
    """Return the best way of each point on at most ``most`` GPUs, the best first.

    Behind them are the ways with engines that are not exact, where one is faster than the point's exact way by more
    than the model's error.

    Raises:
        UserError: No point can be trained on the cluster. The message says why not.
    """
    exact: list[Way] = []
    others: list[Way] = []
    refused = f"no published training can be split over {most} GPUs; give another number by --gpus"
    for point in found:
        numbers = _numbers_of_gpus(point, cluster, most)
        limited = bool(numbers) and 2 * numbers[-1] <= most
        try:
            tried = [_fastest(point, cluster, device, gpus, "ddp", limited) for gpus in numbers]
            if not tried:
                continue
            gpus = min(tried, key=lambda way: _cost(way, cheapest)).gpus
            own, other = (_fastest(point, cluster, device, gpus, names, limited) for names in (_EXACT, _INEXACT))
        except UserError as error:
            refused = str(error)
            continue
        exact.append(own)
        if _cost(other, cheapest) < (1 - MODEL_ERROR) * _cost(own, cheapest):
            others.append(other)
    if not exact:
        raise UserError(refused)
    return [way for kind in (exact, others) for way in sorted(kind, key=lambda way: _cost(way, cheapest))]


def rivals(found: Sequence[Way]) -> list[Way]:
    """Return the exact ways that may be as fast as the first: their bands reach into its own."""
    return [way for way in found[1:] if way.exact and way.least < found[0].most]


def remarks(found: Sequence[Point], best: Sequence[Way], cluster: Cluster, most: int) -> Iterator[str]:
    """Yield what is to be said of a table: the winner, what is left out, and what is assumed."""
    first = best[0]
    near = ", ".join(way.point for way in rivals(best))
    yield (
        f"no clear winner: the bands of {near} reach into that of {first.point}" if near
        else f"{first.point} on {first.gpus} GPUs under {first.engine} is the fastest"
    )  # fmt: skip
    there = {way.point for way in best}
    for point in found:
        if point.name not in there:
            yield f"{point.name} is left out: its batch of {point.recipe.global_batch} cannot be split over {most} GPUs"
    if cluster.input.images_per_s is None:
        yield (
            "input.images_per_s of the cluster is unknown: loaders must give the images/s of the last column; measure "
            "them by `imagenet-fast bench data`"
        )
    yield "predicted, not run: accuracy is that of the published runs, and start and the reading of the data are left out"


def as_recipe(found: Sequence[Point], way: Way, cluster: str) -> str:
    """Return the complete recipe of ``way`` as TOML, with a header that cites its source."""
    point = next(point for point in found if point.name == way.point)
    mean, fewest, most = point.epochs
    engine, wire = way.engine.rsplit(" ", 1)
    tables = point.recipe.model_dump(exclude_none=True)
    tables |= {"ranks": way.gpus, "micro_batch": way.micro_batch, "sync": {"kind": engine, "wire": wire}}
    recipe = parse_recipe(way.point, tables)
    return (
        f"# {way.point} on {way.gpus} GPUs of {cluster}, by `imagenet-fast plan --fastest`: predicted, not run.\n"
        f"# Source: {point.source}: {mean:g} epochs to {recipe.target_top1:g} % on average, {fewest:g} to {most:g} in\n"
        f"# its runs. Predicted: {way.minutes:.3g} minutes ({way.least:.3g} to {way.most:.3g}).\n{to_toml(recipe)}"
    )


def _cost(way: Way, cheapest: bool) -> float:
    return way.gpu_hours if cheapest else way.minutes


def _numbers_of_gpus(point: Point, cluster: Cluster, most: int) -> list[int]:
    """Return numbers of GPUs, in whole nodes, over which the batch can be split and norms see enough images, rising.

    There are the four largest, and below them about one for each power of two.
    """
    each, batch = cluster.gpus_per_node, point.recipe.global_batch
    fewest = min(FEW_IMAGES, point.span or FEW_IMAGES)
    fit = [n for n in range(1, most + 1) if batch % n == 0 and batch // n >= fewest and (n <= each or n % each == 0)]
    below = {n.bit_length(): n for n in fit[:-_WAYS]}
    return [*below.values(), *fit[-_WAYS:]]


def _fastest(point: Point, cluster: Cluster, device: Device, gpus: int, engines: str, limited: bool) -> Way:
    """Return the fastest of the ways with ``engines``.

    Raises:
        UserError: Memory does not hold what norms need, or something that is needed is unknown.
    """
    share = point.recipe.global_batch // gpus
    written = point.recipe.model_copy(update={"ranks": gpus, "micro_batch": share})
    micro_batch = _largest_that_fits(Situation(written, cluster, device, "strong"), share)
    situation = Situation(written.model_copy(update={"micro_batch": micro_batch}), cluster, device, "strong")
    rows = situation.rows(planned_engines(engines, "bf16"), gpus)
    return _way(point, situation, min(rows, key=lambda row: row.step_s), limited)


def _largest_that_fits(situation: Situation, share: int) -> int:
    """Return the largest part of a GPU's share of the batch that its memory holds.

    Raises:
        UserError: Not even one image fits.
    """
    memory_gb = situation.device.memory_gb or math.inf
    sizes = [n for n in range(1, share + 1) if share % n == 0 and needed_gb(situation, n) <= memory_gb]
    if not sizes:
        raise UserError(f"{memory_gb:g} GB of a {situation.device.name} hold no image of {situation.recipe.model.kind}")
    return max(sizes)


def _way(point: Point, situation: Situation, row: Planned, limited: bool) -> Way:
    recipe, cluster = situation.recipe, situation.cluster
    mean, fewest, most = point.epochs
    micro_batch, share = recipe.micro_batch, row.batch
    epochs = next(n for n in range(math.ceil(mean), recipe.epochs + 1) if recipe.evaluates_after(n))
    per_epoch = training_images(recipe) // recipe.global_batch
    evaluations = sum(map(recipe.evaluates_after, range(1, epochs + 1)))
    forward_s = row.compute_s * math.ceil(EVALUATED / row.gpus) / share / 3  # a third of a step's work
    busy_s = row.step_s - row.compute_s * (1 - _smaller_images(situation))
    step_s = max(busy_s, _loading_s(situation, row))
    seconds = epochs * per_epoch * step_s + evaluations * forward_s
    costs: dict[HeldBack, float] = {
        "network": row.exposed_s,
        "stragglers": row.compute_s * (straggling(cluster.stragglers.sigma[1], row.gpus) - 1),
        "input": step_s - busy_s,
        "compute": MODEL_ERROR * row.compute_s,
    }
    held_back: HeldBack = max(costs, key=costs.__getitem__)
    if micro_batch < share and micro_batch < FEW_IMAGES:
        held_back = "memory"
    elif limited and held_back == "compute":
        held_back = "batch-norm span"
    hours, (better, worse) = (
        row.gpus * seconds / 3600,
        (row.efficiency / row.efficiency_high, row.efficiency / row.efficiency_low),
    )
    return Way(
        point.name, row.gpus, f"{row.engine} {row.wire}", row.exact and row.wire in ("fp32", "bf16", "fp16"),
        micro_batch, epochs, seconds / 60, seconds * better * fewest / mean / 60,
        seconds * worse * most / mean / 60, hours,
        None if cluster.usd_per_gpu_hour is None else hours * cluster.usd_per_gpu_hour,
        row.batch * min(row.gpus, cluster.gpus_per_node) / step_s, held_back,
    )  # fmt: skip


def _smaller_images(situation: Situation) -> float:
    """Return the mean compute of a recipe whose images grow, over that at the last size."""
    recipe = situation.recipe
    knots = recipe.data.sizes
    if not knots:
        return 1.0
    compute = situation.device.compute(recipe.model.kind)[0]
    ends = [*(epoch for epoch, _ in knots[1:]), recipe.epochs + 1.0]
    spent = sum(
        (end - begin) * compute.seconds(recipe.micro_batch, pixels)
        for (begin, pixels), end in zip(knots, ends, strict=True)
    )
    return spent / recipe.epochs / compute.seconds(recipe.micro_batch, knots[-1][1])


def _loading_s(situation: Situation, row: Planned) -> float:
    """Return the seconds in which a node's loaders give the images of a step; 0 if their rate is not known."""
    given = situation.cluster.input.images_per_s
    return 0.0 if given is None else row.batch * min(row.gpus, situation.cluster.gpus_per_node) / given
