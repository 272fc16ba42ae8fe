"""Find the published way to train that reaches its target first on a cluster, or with the fewest GPU hours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.plan.cluster import Cluster
from imagenet_fast.plan.devices import Pace
from imagenet_fast.plan.prediction import BySide, Result, Situation, planned_engines
from imagenet_fast.plan.report import needed_gb
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.load import load_recipe, parse_recipe, read_toml, to_toml
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.units import three_digits

FEW_IMAGES = 32
"""Batch norms of fewer images are not published to reach 75.9 %: NVIDIA's largest submissions have 32."""
EVALUATED = 50_000
"""Images of ImageNet's validation set."""
SHOWN = 15
"""Rows of the table at most."""
_EXACT = "lazy,hybrid,dear,ring,ddp,allreduce"
"""In this order: one is taken instead of those before it if it is faster by more than the model's error."""
_INEXACT = "lazy:int8,hybrid:int8,dear:int8,sparse,powersgd"

HeldBack = Literal["compute", "host", "network", "stragglers", "input", "memory", "batch-norm span"]


@dataclass(frozen=True)
class Training:
    """A published training: its settings as published, and the epochs that it took to the target."""

    name: str
    recipe: Recipe
    epochs: tuple[float, float, float]
    """Mean, fewest and most of its runs."""
    source: str


@dataclass(frozen=True)
class Way(Row):
    """A published training on a number of GPUs with an engine, and the prediction."""

    training: str = field(metadata=column("training"))
    """The training: a shipped recipe, or LARS with the batch of one of MLCommons' reference convergence points."""
    engine: str = field(metadata=column("engine"))
    """Engine and wire dtype."""
    exact: bool = field(metadata=column("accuracy", form=lambda exact: "published" if exact else "not published"))
    """Whether its accuracy is the published one; with engines that are not exact it is not published."""
    held_back_by: HeldBack = field(metadata=column("held back by"))
    """The cause that costs most time, if it is more than the model's error; else ``compute``.

    ``host`` stands for GPUs that wait for kernels to be launched, ``memory`` for gradients that are accumulated, and
    ``batch-norm span`` for GPUs that stay idle, since norms would see fewer than 32 images.
    """
    minutes: float = field(metadata=column("min", form=three_digits))
    """Minutes of steps and evaluations up to the evaluation that shows the target."""
    least: float = field(metadata=column("from", form=three_digits))
    """The same with the fewest epochs of the published runs, and the better end of NICs and stragglers."""
    most: float = field(metadata=column("to", form=three_digits))
    """The same with the most epochs and the worse end."""
    gpus: int = field(metadata=column("GPUs"))
    global_batch: int
    micro_batch: int = field(metadata=column("micro"))
    """Images that a GPU computes at once."""
    epochs: int = field(metadata=column("epochs"))
    """Epochs up to the evaluation that shows the target."""
    gpu_hours: float = field(metadata=column("GPU h", form=three_digits))
    usd: float | None = field(metadata=column("USD", form=three_digits))
    """None: the cluster has no ``usd_per_gpu_hour``."""
    pace: Pace = field(metadata=column("steps of"))
    """Whose steps these are: this program's, launched or replayed, or those of the programs that were published."""
    loader: str = field(metadata=column("loader"))
    """The recipe's ``data.loader``; ``threads`` of ``resnet50-8gpu-mild`` reads stored pixels."""
    node_images_per_s: float = field(metadata=column("images/s a node", form=",.0f"))
    """Images a second that a node's loaders must give."""


def published_trainings(model: str) -> list[Training]:
    """Return every published training of ``model``."""
    found = []
    for name, point in read_toml(Path(__file__).with_name("points.toml")).items():
        if point["model"] == model:
            settings = ["reference_ranks=1", "parallel.tensor=1", *point.get("settings", ())]
            recipe = load_recipe(point["recipe"], "lazy", settings)
            found.append(Training(name, recipe, tuple(point["epochs"]), point["source"]))
    return found


def fastest_ways(
    cluster: Cluster, trainings: Sequence[Training], most: int, cheapest: bool = False
) -> tuple[list[Way], list[str]]:
    """Return the best way of each training on at most ``most`` GPUs, and a sentence for each that has none.

    The best comes first: of the fewest minutes, or if ``cheapest`` of the fewest GPU hours. Where engines that are not
    exact are faster by more than the model's error, the best of them has a row, too.

    Raises:
        UserError: No training has a way. The message says why the first has none.
    """
    engines = [planned_engines(names) for names in (_EXACT, _INEXACT)]
    best: list[Way] = []
    refused: list[str] = []
    for training in trainings:
        try:
            best += list(_best(_plans(training, cluster, most, cheapest), engines))
        except UserError as error:
            refused.append(f"{training.name} is left out: {error}")
    if not best:
        raise UserError(refused[0])
    return sorted(best, key=lambda way: way.gpu_hours if cheapest else way.minutes), refused


def remarks(cluster: Cluster, best: Sequence[Way], refused: Sequence[str], cheapest: bool) -> Iterator[str]:
    """Yield what is to be said of a table: the winner, what is left out, and what is assumed.

    There is no clear winner if bands of others reach into that of the first.
    """
    first, *others = (way for way in best if way.exact)
    near = [
        way.training for way in others
        if (way.gpus / first.gpus if cheapest else 1.0) * way.least < first.most
    ]  # fmt: skip
    named = f"{first.training} on {first.gpus} GPU{'s' * (first.gpus > 1)} under {first.engine}"
    if near:
        yield f"no clear winner: the bands of {', '.join(near)} reach into that of {named}"
    else:
        yield f"{named} is the {'cheapest' if cheapest else 'fastest'}"
    yield from refused
    if any(way.held_back_by == "batch-norm span" for way in best):
        yield f"batch-norm span: norms would see fewer than {FEW_IMAGES} images on more GPUs, so those stay idle"
    if any(way.held_back_by == "memory" for way in best):
        yield "memory: a GPU does not hold its share of the batch at once, so gradients are accumulated"
    if unknown := {way.loader for way in best if cluster.images_per_s(way.loader, 1) is None}:
        named = " and ".join(f"`{loader}`" for loader in sorted(unknown))
        yield f"what {named} feeds is unknown, so such rows wait for no images: it must give those of the last column"
    yield "predicted, not run: accuracy and epochs are those of the published runs; start and reading are left out"


@dataclass(frozen=True)
class _Plan(Situation):
    """A training on a number of GPUs."""

    training: Training
    idle: float
    """Share of the GPUs that norms of too few images leave idle."""
    cheapest: bool

    def cost(self, seconds: BySide) -> float:
        """Return what is best if it is least, the GPU hours or the minutes with steps of these ``seconds``."""
        minutes = self.minutes(seconds, self.training.epochs[0])
        return self.batching.ranks * minutes / 60 if self.cheapest else minutes

    def minutes(self, seconds: BySide, epochs: float) -> float:
        """Return the minutes up to the evaluation that shows what ``epochs`` have reached."""
        recipe, last = self.recipe, self.shown(epochs)
        evaluations = sum(map(recipe.evaluates_after, range(1, last + 1)))
        images = math.ceil(EVALUATED / self.batching.ranks)
        forward_s = self.compute.seconds(images, recipe.data.evaluated_size) / 3
        return (self.sides(last).total() * self.mean_s(seconds, last, loaded=True) + evaluations * forward_s) / 60

    def shown(self, epochs: float) -> int:
        """Return the first epoch after ``epochs`` that an evaluation follows."""
        recipe = self.recipe
        return next(n for n in range(math.ceil(epochs), recipe.epochs + 1) if recipe.evaluates_after(n))

    def fastest(self, engines: Sequence[Sync]) -> tuple[Sync, Result]:
        """Return the first of ``engines`` than which no other is faster by more than the model's error."""
        first, *others = engines
        found = first, self.predict(first)
        for engine in others:
            worthwhile_s = (1 - self.model_error) * found[1].step_s
            if worthwhile_s <= self.mean_s(self.compute_s(slowest=True)):
                break
            if (result := self.predict(engine)).step_s < worthwhile_s:
                found = engine, result
        return found

    def way(self, engine: Sync, result: Result) -> Way:
        """Return the way with an engine whose step is predicted as ``result``."""
        recipe, gpus = self.recipe, self.batching.ranks
        mean, fewest, most = self.training.epochs
        worst, best = (self.predict(engine, case, result.fuse).seconds for case in (0, 2))
        minutes = self.minutes(result.seconds, mean)
        hours, price = gpus * minutes / 60, self.cluster.usd_per_gpu_hour
        alone_s, slowest_s = (self.mean_s(self.compute_s(slowest)) for slowest in (False, True))
        step_s, loaded_s = (self.mean_s(result.seconds, self.shown(mean), loaded) for loaded in (False, True))
        costs: dict[HeldBack, float] = {
            "network": result.step_s - slowest_s, "stragglers": slowest_s - alone_s,
            "input": loaded_s - step_s, "memory": self.compute.c0 / 1e3 * (self.batching.accumulation - 1),
            "batch-norm span": self.idle * alone_s, "host": self.host_s, "compute": self.model_error * alone_s,
        }  # fmt: skip
        return Way(
            self.training.name, f"{engine.kind} {engine.wire}", not engine.keeps and engine.wire == "bf16",
            max(costs, key=costs.__getitem__), minutes, (1 - self.model_error) * self.minutes(best, fewest),
            (1 + self.model_error) * self.minutes(worst, most), gpus, recipe.global_batch, self.batching.micro_batch,
            self.shown(mean), hours, None if price is None else hours * price, self.cluster.pace,
            getattr(recipe.data, "loader", ""), self.node_images / loaded_s,
        )  # fmt: skip


def _plans(training: Training, cluster: Cluster, most: int, cheapest: bool) -> list[_Plan]:
    """Return the training on each number of GPUs that it can be trained on, the one first that may cost least.

    Raises:
        UserError: There is none. The message says why.
    """
    recipe, device, each = training.recipe, cluster.gpu, cluster.gpus_per_node
    batch, plans = recipe.global_batch, []
    counts = [
        n for n in range(1, most + 1)
        if batch % n == 0 and batch // n >= FEW_IMAGES and (n <= each or n % each == 0)
    ]  # fmt: skip
    empty_gb, memory_gb = needed_gb(recipe, device, 0), device.memory_gb or math.inf
    fit = max(0, (memory_gb - empty_gb) / (needed_gb(recipe, device, 1) - empty_gb))
    for gpus in counts:
        share = batch // gpus
        micro = max((n for n in range(FEW_IMAGES, share + 1) if share % n == 0 and n <= fit), default=None)
        if micro is not None:
            idle = 1 - gpus / most if gpus == counts[-1] and share < 2 * FEW_IMAGES else 0.0
            plans.append(_Plan(recipe, cluster, Batching(gpus, micro, share // micro), training, idle, cheapest))
    if not plans:
        raise UserError(f"{memory_gb:g} GB of a GPU hold {fit:.0f} of its images, and norms need {FEW_IMAGES}")
    return sorted(plans, key=lambda plan: plan.cost(plan.compute_s(slowest=True)))


def _best(plans: Sequence[_Plan], groups: Iterable[Sequence[Sync]]) -> Iterator[Way]:
    """Yield the best way with an engine of each group, if it costs less than that of the group before by the error."""
    limit = math.inf
    for engines in groups:
        best = None
        for plan in plans:
            if plan.cost(plan.compute_s(slowest=True)) >= limit:
                break  # nor can those behind it
            engine, result = plan.fastest(engines)
            if plan.cost(result.seconds) < limit:
                limit, best = plan.cost(result.seconds), plan.way(engine, result)
        if best is not None:
            yield best
        limit *= 1 - plans[0].model_error


def as_recipe(known: Sequence[Training], way: Way, cluster: Cluster) -> str:
    """Return the complete recipe of a way as TOML, with a header that cites its source."""
    training = next(training for training in known if training.name == way.training)
    mean, fewest, most = training.epochs
    engine, wire = way.engine.rsplit(" ", 1)
    tables = training.recipe.model_dump(exclude_none=True)
    tables |= {"reference_ranks": way.gpus, "micro_batch": way.micro_batch, "sync": {"kind": engine, "wire": wire}}
    recipe = parse_recipe(way.training, tables)
    return (
        f"# {way.training}, for {way.gpus} GPUs of {cluster.name}, by `imagenet-fast plan fastest`: predicted, not "
        f"run.\n"
        f"# Source: {training.source}.\n"
        f"# Its runs took {mean:g} epochs to {recipe.target_top1:g} % on average, {fewest:g} to {most:g}.\n"
        f"# Predicted: {three_digits(way.minutes)} minutes ({three_digits(way.least)} to "
        f"{three_digits(way.most)}).\n# Steps: {cluster.gpu.compute(recipe.model.kind).source}.\n{to_toml(recipe)}"
    )
