"""Find the published way to train that reaches its target first on a cluster, or with the fewest GPU hours."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.rows import Row, column
from imagenet_fast.plan.cluster import Cluster
from imagenet_fast.plan.devices import Device
from imagenet_fast.plan.network import straggling
from imagenet_fast.plan.prediction import (
    MODEL_ERROR,
    Result,
    Situation,
    Step,
    planned_engines,
    predict_step,
    training_images,
)
from imagenet_fast.plan.report import needed_gb
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_recipe, to_toml
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

Target = Literal["resnet50", "alexnet"]
HeldBack = Literal["compute", "network", "stragglers", "input", "memory", "batch-norm span"]


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
    gpus: int = field(metadata=column("GPUs"))
    engine: str = field(metadata=column("engine"))
    """Engine and wire dtype."""
    exact: bool = field(metadata=column("accuracy", form=lambda exact: "published" if exact else "not published"))
    """Whether its accuracy is the published one; with engines that are not exact it is not published."""
    global_batch: int
    micro_batch: int = field(metadata=column("micro"))
    """Images that a GPU computes at once."""
    epochs: int = field(metadata=column("epochs"))
    """Epochs up to the evaluation that shows the target."""
    minutes: float = field(metadata=column("min", form=three_digits))
    """Minutes of steps and evaluations up to there."""
    least: float = field(metadata=column("least", form=three_digits))
    """The same with the fewest epochs of the published runs, and the better end of NICs and stragglers."""
    most: float = field(metadata=column("most", form=three_digits))
    """The same with the most epochs and the worse end."""
    gpu_hours: float = field(metadata=column("GPU h", form=three_digits))
    usd: float | None = field(metadata=column("USD", form=three_digits))
    """None: the cluster has no ``usd_per_gpu_hour``."""
    node_images_per_s: float = field(metadata=column("images/s a node", form=",.0f"))
    """Images a second that a node's loaders must give."""
    held_back_by: HeldBack = field(metadata=column("held back by"))
    """The cause that costs most time, if it is more than the model's error; else ``compute``.

    ``memory`` stands for gradients that are accumulated, and ``batch-norm span`` for GPUs that stay idle, since norms
    would see fewer than 32 images.
    """


def published_trainings(model: Target) -> list[Training]:
    """Return every published training of ``model``."""
    tables = tomllib.loads(Path(__file__).with_name("points.toml").read_text(encoding="utf-8"))
    return [_training(name, **table) for name, table in tables.items() if table.pop("model") == model]


def _training(
    name: str, recipe: str, epochs: tuple[float, float, float], source: str, settings: dict[str, object] | None = None
) -> Training:
    changed = {"ranks": 1, "parallel.tensor": 1, **(settings or {})}
    overrides = [f"{key}={value}" for key, value in changed.items()]
    return Training(name, load_recipe(find_recipe(recipe), "lazy", overrides), epochs, source)


@dataclass(frozen=True)
class Search:
    """A search for the best ways to train on a cluster."""

    cluster: Cluster
    device: Device
    cheapest: bool
    """Whether the fewest GPU hours are best, and not the fewest minutes."""

    def cost(self, way: Way) -> float:
        """Return what is best if it is least."""
        return way.gpu_hours if self.cheapest else way.minutes

    def ways(self, found: Sequence[Training], most: int) -> tuple[list[Way], list[str]]:
        """Return the best way of each training on at most ``most`` GPUs, and a sentence for each that has none.

        The best comes first. Where engines that are not exact are faster by more than the model's error, the best of
        them has a row, too.

        Raises:
            UserError: No training has a way. The message says why the first has none.
        """
        exact, inexact = (planned_engines(names, "bf16") for names in (_EXACT, _INEXACT))
        best: list[Way] = []
        refused: list[str] = []
        for training in found:
            try:
                plans = self._plans(training, most)
                own = self._best(plans, exact)
                assert own is not None
                other = self._best(plans, inexact, (1 - MODEL_ERROR) * self.cost(own))
            except UserError as error:
                refused.append(f"{training.name} is left out: {error}")
                continue
            best += [own] if other is None else [own, other]
        if not best:
            raise UserError(refused[0])
        return sorted(best, key=self.cost), refused

    def remarks(self, best: Sequence[Way], refused: Sequence[str]) -> Iterator[str]:
        """Yield what is to be said of a table: the winner, what is left out, and what is assumed.

        There is no clear winner if bands of others reach into that of the first.
        """
        first, *others = (way for way in best if way.exact)
        scale = {way.training: way.gpus / first.gpus if self.cheapest else 1.0 for way in others}
        near = [way.training for way in others if scale[way.training] * way.least < first.most]
        named = f"{first.training} on {first.gpus} GPU{'s' * (first.gpus > 1)} under {first.engine}"
        yield (
            f"no clear winner: the bands of {', '.join(near)} reach into that of {named}" if near
            else f"{named} is the {'cheapest' if self.cheapest else 'fastest'}"
        )  # fmt: skip
        yield from refused
        if self.cluster.input.images_per_s is None:
            yield (
                "input.images_per_s of the cluster is unknown, so no row waits for images: a node's loaders must give "
                "those of the last column, and the most that MLPerf's logs show is 63,600"
            )
        yield (
            "predicted, not run: accuracy and epochs are those of the published runs; start and reading are left out"
        )

    def _plans(self, training: Training, most: int) -> list[_Plan]:
        """Return the training on each number of GPUs that it can be trained on, the one first that may cost least.

        Raises:
            UserError: There is none. The message says why.
        """
        batch, each = training.recipe.global_batch, self.cluster.gpus_per_node
        shares = {
            n: batch // n for n in range(1, most + 1)
            if batch % n == 0 and batch // n >= FEW_IMAGES and (n <= each or n % each == 0)
        }  # fmt: skip
        situation = Situation(training.recipe, self.cluster, self.device, "strong")
        empty_gb, memory_gb = needed_gb(situation, 0), self.device.memory_gb or math.inf
        fit = max(0, (memory_gb - empty_gb) / (needed_gb(situation, 1) - empty_gb))
        rate, plans = self.cluster.input.images_per_s or math.inf, []
        for gpus, share in shares.items():
            parts = [n for n in range(FEW_IMAGES, share + 1) if share % n == 0 and n <= fit]
            if parts:
                step = situation.step(Batching(gpus, parts[-1], share // parts[-1]))
                slowest_s = step.compute_s * straggling(self.cluster.stragglers.sigma[1], gpus)
                idle = 1 - gpus / most if gpus == max(shares) and share < 2 * FEW_IMAGES else 0.0
                images = share * min(gpus, each)
                plans.append(_Plan(self, training, gpus, step, slowest_s, images, images / rate, idle))
        if not plans:
            raise UserError(f"{memory_gb:g} GB of a GPU hold {fit:.0f} of its images, and norms need {FEW_IMAGES}")
        return sorted(plans, key=lambda plan: plan.cost(plan.slowest_s))

    def _best(self, plans: Sequence[_Plan], engines: Sequence[Sync], limit: float = math.inf) -> Way | None:
        """Return the best way with one of ``engines`` that costs less than ``limit``, or None."""
        best = None
        for plan in plans:
            if plan.cost(plan.slowest_s) >= limit:
                break  # nor can those behind it
            engine, result = plan.fastest(engines)
            if plan.cost(result.step_s) < limit:
                limit, best = plan.cost(result.step_s), plan.way(engine, result)
        return best


@dataclass(frozen=True)
class _Plan:
    """A training on a number of GPUs."""

    search: Search
    training: Training
    gpus: int
    step: Step
    slowest_s: float
    """Seconds that a step computes on the slowest rank: no engine is faster."""
    node_images: int
    """Images of a step that a node's loaders must give."""
    loading_s: float
    """The seconds in which they give them; 0 if their rate is not known."""
    idle: float
    """Share of the GPUs that norms of too few images leave idle."""

    def cost(self, step_s: float) -> float:
        """Return the search's cost of a way with steps of ``step_s``."""
        minutes = self.minutes(step_s, self.training.epochs[0])
        return self.gpus * minutes / 60 if self.search.cheapest else minutes

    def minutes(self, step_s: float, epochs: float) -> float:
        """Return the minutes up to the evaluation that shows what ``epochs`` have reached."""
        recipe, device, last = self.training.recipe, self.search.device, self.shown(epochs)
        evaluations = sum(map(recipe.evaluates_after, range(1, last + 1)))
        images = math.ceil(EVALUATED / self.gpus)
        forward_s = device.compute(recipe.model.kind).seconds(images, recipe.data.evaluated_size) / 3
        steps = last * (training_images(recipe) // recipe.global_batch)
        return (steps * max(step_s, self.loading_s) + evaluations * forward_s) / 60

    def shown(self, epochs: float) -> int:
        """Return the first epoch after ``epochs`` that an evaluation follows."""
        recipe = self.training.recipe
        return next(n for n in range(math.ceil(epochs), recipe.epochs + 1) if recipe.evaluates_after(n))

    def _predicted(self, engine: Sync, which: int, sigma: float, fuse: float | None = None) -> Result:
        cluster = self.search.cluster
        layout = cluster.layout(self.gpus, self.search.device.on_gpu)
        return predict_step(engine, self.step, cluster.network(layout, which), sigma, fuse)

    def fastest(self, engines: Sequence[Sync]) -> tuple[Sync, Result]:
        """Return the first of ``engines`` than which no other is faster by more than the model's error."""
        found: tuple[Sync, Result] | None = None
        for engine in engines:
            result = self._predicted(engine, 1, self.search.cluster.stragglers.sigma[1])
            if found is None or result.step_s < (1 - MODEL_ERROR) * found[1].step_s:
                found = engine, result
            if (1 - MODEL_ERROR) * found[1].step_s <= self.slowest_s:
                break
        assert found is not None
        return found

    def way(self, engine: Sync, result: Result) -> Way:
        """Return the way with an engine whose step is predicted as ``result``."""
        recipe, cluster, gpus = self.training.recipe, self.search.cluster, self.gpus
        low, _, high = cluster.stragglers.sigma
        mean, fewest, most = self.training.epochs
        worst, best = (self._predicted(engine, *end, result.fuse).step_s for end in ((0, high), (2, low)))
        minutes = self.minutes(result.step_s, mean)
        hours = gpus * minutes / 60
        accumulated = self.search.device.compute(recipe.model.kind).c0 / 1e3 * (self.step.accumulation - 1)
        costs: dict[HeldBack, float] = {
            "network": result.step_s - self.slowest_s, "stragglers": self.slowest_s - self.step.compute_s,
            "input": self.loading_s - result.step_s, "memory": accumulated,
            "batch-norm span": self.idle * self.step.compute_s, "compute": MODEL_ERROR * self.step.compute_s,
        }  # fmt: skip
        return Way(
            self.training.name, gpus, f"{engine.kind} {engine.wire}", engine.exact and engine.wire == "bf16",
            recipe.global_batch, self.step.batch, self.shown(mean), minutes, self.minutes(best, fewest),
            self.minutes(worst, most), hours,
            None if cluster.usd_per_gpu_hour is None else hours * cluster.usd_per_gpu_hour,
            self.node_images / max(result.step_s, self.loading_s), max(costs, key=costs.__getitem__),
        )  # fmt: skip


def first_exact(ways: Sequence[Way]) -> Way:
    """Return the first way whose accuracy is published."""
    return next(way for way in ways if way.exact)


def as_recipe(known: Sequence[Training], way: Way, cluster: str) -> str:
    """Return the complete recipe of a way as TOML, with a header that cites its source."""
    training = next(training for training in known if training.name == way.training)
    mean, fewest, most = training.epochs
    engine, wire = way.engine.rsplit(" ", 1)
    tables = training.recipe.model_dump(exclude_none=True)
    tables |= {"ranks": way.gpus, "micro_batch": way.micro_batch, "sync": {"kind": engine, "wire": wire}}
    recipe = parse_recipe(way.training, tables)
    return (
        f"# {way.training}, for {way.gpus} GPUs of {cluster}, by `imagenet-fast plan --fastest`: predicted, not run.\n"
        f"# Source: {training.source}.\n"
        f"# Its runs took {mean:g} epochs to {recipe.target_top1:g} % on average, {fewest:g} to {most:g}.\n"
        f"# Predicted: {three_digits(way.minutes)} minutes ({three_digits(way.least)} to "
        f"{three_digits(way.most)}).\n{to_toml(recipe)}"
    )
