"""Predict the step of each engine on a cluster: closed forms a collective, an event loop over a step's messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from imagenet_fast.cost_model.collectives import BLOCK, cost_of, piece_bytes, slot_alignment, wire_format
from imagenet_fast.cost_model.declarations import declare
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.messages import Slot, places_in_pool
from imagenet_fast.cost_model.step_prediction import StepModel
from imagenet_fast.cost_model.step_simulator import CodecCost
from imagenet_fast.data.order import BatchIndices, TrainSampler, resolution
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.plan.cluster import Cluster
from imagenet_fast.plan.devices import Compute
from imagenet_fast.plan.network import StatedNetwork, nic_share
from imagenet_fast.recipe.batching import Batching, scale_recipe, split_batch
from imagenet_fast.recipe.data_config import Data, ImageData
from imagenet_fast.recipe.load import parse_engines
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import AllReduceSync, SparseSync, Sync
from imagenet_fast.units import three_digits

ENGINES = "ddp,allreduce,ring,lazy,hybrid,dear,lazy:int8,hybrid:int8,dear:int8,sparse,powersgd"
IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000, "digits": 1_433}
"""Training images of the known data sets."""
GPU_CODEC = CodecCost(4e-11, 8e-11)
"""Assumed seconds per byte to encode and decode 8-bit codes on a GPU, by passes over its memory."""
MODEL_ERROR, MODEL_ERROR_ON_GPU = 0.02, 0.06
"""Engines that differ by less are not told apart. Between shaped CPUs measured steps are missed by 1.7 % on average;
those of this program on one GPU that the model was not given by 6.0 %, see `plan rows`."""

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Planned(Row):
    """One engine's step on a number of GPUs."""

    note = (
        "+: communication that nothing hides. NIC: out of a node. eff.: against as many single GPUs, with its band. "
        "*: what auto would take."
    )

    engine: str = field(metadata=column("engine"))
    """Name of the engine; ``allreduce fused`` sends one message after backward."""
    wire: str = field(metadata=column("wire"))
    """Wire dtype."""
    gpus: int = field(metadata=column("GPUs"))
    """Number of GPUs."""
    nic_gbit: float | None = field(metadata=column("Gbit/s", form="g"))
    """Rate of all NICs of a node together, in Gbit/s."""
    batch: int
    """Images a step of one GPU, accumulation included."""
    step_s: float = field(metadata=column("", "ms/step", ".2f"))
    """Seconds of a step, with the wait for the slowest rank."""
    compute_s: float = field(metadata=column("compute", "ms", ".2f"))
    """Seconds of a step that one GPU computes alone."""
    exposed_s: float = field(metadata=column("+", "ms", ".2f"))
    """Communication that nothing hides: ``step_s`` less the slowest rank's compute."""
    nic_bytes: float = field(metadata=column("NIC", "MB", ".1f"))
    """Bytes that the busiest node sends to others in a step."""
    bucket_bytes: float | None
    """Bucket size that the cost model chooses, in bytes on the wire; None: everything at once."""
    images_per_s: float = field(metadata=column("images/s", form=",.0f"))
    """Images a second of all GPUs."""
    efficiency: float = field(metadata=column("eff.", form=".1%"))
    """Images a second over those of as many single GPUs."""
    efficiency_low: float = field(metadata=column("low", form=".0%"))
    """With the low efficiency of the NICs and the high sigma of the stragglers."""
    efficiency_high: float = field(metadata=column("high", form=".0%"))
    """With the high efficiency of the NICs and the low sigma of the stragglers."""
    steps: int = field(metadata=column("steps"))
    """Steps of the recipe's epochs."""
    train_s: float = field(metadata=column("train", "min", three_digits))
    """Seconds of these steps, without evaluation and start."""
    exact: bool
    """Whether every step is synchronous SGD but for rounding to the wire dtype."""
    chosen: bool = field(metadata=column("auto", form=lambda chosen: "*" if chosen else ""))
    """Whether ``auto`` would take it: the fastest exact engine of ours."""

    @property
    def ours(self) -> bool:
        """Whether it is one of those among which ``auto`` chooses."""
        return self.exact and self.engine not in ("ddp", "allreduce fused")


def label(settings: Sync) -> str:
    """Return an engine's name in tables."""
    return f"{settings.kind} fused" if isinstance(settings, AllReduceSync) and settings.fused else settings.kind


def planned_engines(text: str | None, overrides: Sequence[str] = ()) -> list[Sync]:
    """Parse the engines to predict, in bf16 unless they say otherwise; None: all, and one message after backward.

    Raises:
        UserError: A name or a value is wrong, or an engine chooses another.
    """
    engines = parse_engines(ENGINES if text is None else text, "bf16", overrides)
    if text is None:
        engines.insert(2, AllReduceSync(wire="bf16", fused=True))
    for engine in engines:
        if engine.chooses:
            raise UserError(f"--sync {engine.kind} becomes one of the others, and `plan` marks which; leave it out")
    return engines


@dataclass(frozen=True)
class PlannedSlot:
    """A slot of a model that is not there."""

    index: int
    layer: str
    shape: tuple[int, ...]
    connected: bool
    start: int
    stop: int


def planned_slots(profile: Profile, alignment: int) -> list[PlannedSlot]:
    """Return the slots of the gradients in the order in which they are ready."""
    params = [(layer, shape) for layer in reversed(profile.layers) for shape in reversed(layer.shapes)]
    places = places_in_pool((math.prod(shape) for _, shape in params), alignment)
    return [
        PlannedSlot(index, layer.name, shape, any(len(other) == 2 for other in layer.shapes), at.start, at.stop)
        for index, ((layer, shape), at) in enumerate(zip(params, places, strict=True))
    ]


BySide = Mapping[int, float]
"""Seconds of a step by the side of its images in pixels, for all sides that a recipe's images have."""


class Result(NamedTuple):
    """A predicted step, its bucket size, and the bytes that the busiest node sends."""

    step_s: float
    fuse: float
    nic_bytes: float
    seconds: BySide = MappingProxyType({})
    """Seconds of the steps of each size of images; ``step_s`` is the mean of all steps."""


def predict_step(
    settings: Sync, profile: Profile, network: StatedNetwork, fuse: float | None = None, before_s: float = 0.0
) -> Result:
    """Predict one engine's step.

    Args:
        settings: The engine.
        profile: Gradients and compute of a micro-batch, on the slowest rank.
        network: The costs of collectives.
        fuse: Bucket size in bytes on the wire; None: the best by the cost model.
        before_s: Seconds of earlier micro-batches, whose gradients are added up and not sent.
    """
    layout = network.layout
    timing = replace(profile.timing, forward_s=profile.forward_s + before_s)
    if layout.size == 1:
        return Result(timing.compute_s, math.inf, 0.0)
    wire = wire_format(settings.wire)
    alignment = math.lcm(16, slot_alignment(layout, wire))
    engine = declare(settings)  # type: ignore[arg-type]  # those that choose are refused
    if isinstance(settings, SparseSync) and engine.bucket_bytes is None:
        engine = replace(engine, bucket_bytes=piece_bytes(layout) / 4)  # its own, by which it packs chunks
    network = replace(network, servers=engine.servers, inside_scale=2.0 if wire.coded else 1.0)
    codec = GPU_CODEC if wire.coded and layout.on_gpu else CodecCost()
    slots: Sequence[Slot] = planned_slots(profile, alignment)
    model = StepModel(engine, slots, alignment, layout, wire, network, lambda: codec, settings.share)
    if fuse is None:
        fuse, step_s = model.best(timing)
    else:
        step_s = model.step_s(fuse, timing)
    messages = model.messages(fuse)
    sent = sum(
        message.task.message
        / cost_of(message.collective, layout, engine.servers)
        * nic_share(message.collective, layout, engine.servers)
        for message in messages
    )
    sent *= settings.share * (1 + 2 / BLOCK if wire.coded else 1.0)  # codes have a bf16 scale a block
    if isinstance(settings, SparseSync):  # and chunks their norms in fp32
        sent += 4.0 * math.ceil(profile.elements / settings.chunk) * nic_share("hierarchical", layout)
    return Result(step_s, fuse, sent)


@dataclass(frozen=True)
class Situation:
    """A recipe on a cluster, whose step time is to be predicted."""

    recipe: Recipe
    cluster: Cluster
    batching: Batching
    """How its batch is divided over GPUs."""

    @property
    def node_images(self) -> int:
        """Images of a step that a node's loaders must give."""
        gpus = self.batching.ranks
        return self.batching.global_batch // gpus * min(gpus, self.cluster.gpus_per_node)

    @property
    def compute(self) -> Compute:
        """What is known about the model's step on the device."""
        return self.cluster.gpu.compute(self.recipe.model.kind)

    @property
    def model_error(self) -> float:
        """The share by which the model may miss a step."""
        return MODEL_ERROR_ON_GPU if self.cluster.gpu.on_gpu else MODEL_ERROR

    @property
    def loading_s(self) -> float:
        """Seconds in which a node's loaders give the images of a step; 0 if their rate is not known."""
        gpus = min(self.batching.ranks, self.cluster.gpus_per_node)
        return self.node_images / (self.cluster.images_per_s(getattr(self.recipe.data, "loader", ""), gpus) or math.inf)

    def sides(self, epochs: int) -> Counter[int]:
        """Return how many steps of the first ``epochs`` have images of which side, in pixels."""
        return _sides(self.recipe.data, training_images(self.recipe), self.batching.global_batch, epochs)

    def compute_s(self, slowest: bool = False, launched: bool = True) -> BySide:
        """Return the seconds that a step computes on a GPU alone, or on the slowest rank: no engine is faster.

        Without ``launched`` no step waits for the host.
        """
        times = self.batching.accumulation * (self.cluster.slowest(self.batching.ranks) if slowest else 1.0)
        compute = self.compute if launched else self.compute.model_copy(update={"host": 0.0})
        sides = self.sides(self.recipe.epochs)
        return {side: times * compute.seconds(self.batching.micro_batch, side) for side in sides}

    @property
    def host_s(self) -> float:
        """Mean seconds by which a step is longer because the host must launch it."""
        return self.mean_s(self.compute_s()) - self.mean_s(self.compute_s(launched=False))

    def mean_s(self, seconds: BySide, epochs: int | None = None, loaded: bool = False) -> float:
        """Return the mean step of the first ``epochs``, by default all; ``loaded``: that may wait for its images."""
        sides, least = self.sides(epochs or self.recipe.epochs), self.loading_s if loaded else 0.0
        return sum(count * max(seconds[side], least) for side, count in sides.items()) / sides.total()

    def predict(self, engine: Sync, case: int = 1, fuse: float | None = None) -> Result:
        """Predict one engine's steps; ``case`` is that of ``Cluster.network``, ``fuse`` that of ``predict_step``.

        The bucket size is the best for a step of the mean time.
        """
        ranks, accumulation = self.batching.ranks, self.batching.accumulation
        slowest, network = self.cluster.slowest(ranks, case), self.cluster.network(ranks, case)
        layers = self.cluster.gpu.layers(self.recipe.model.kind)

        def step(compute_s: float, fuse: float | None) -> Result:
            micro_s = slowest * compute_s / accumulation
            return predict_step(engine, layers.scaled_to(micro_s), network, fuse, (accumulation - 1) * micro_s)

        alone = self.compute_s()
        mean = step(self.mean_s(alone), fuse)
        if len(alone) == 1:
            return mean._replace(seconds=dict.fromkeys(alone, mean.step_s))
        found = {side: step(seconds, mean.fuse).step_s for side, seconds in alone.items()}
        return mean._replace(seconds=found, step_s=self.mean_s(found))

    def rows(self, engines: Sequence[Sync]) -> list[Planned]:
        """Predict every engine.

        Raises:
            UserError: The GPUs are no whole number of nodes, or a value of the cluster is unknown.
        """
        gpus, batch = self.batching.ranks, self.batching.global_batch
        steps = self.sides(self.recipe.epochs).total()
        compute_s, slowest_s = self.mean_s(self.compute_s()), self.mean_s(self.compute_s(slowest=True))
        rows = []
        for settings in engines:
            found = self.predict(settings)
            worst, best = (self.predict(settings, case, found.fuse).step_s for case in (0, 2))
            rows.append(
                Planned(
                    label(settings), settings.wire, gpus, self.cluster.nic.node_gbit, batch // gpus, found.step_s,
                    compute_s, max(0.0, found.step_s - slowest_s), found.nic_bytes,
                    found.fuse if math.isfinite(found.fuse) else None, batch / found.step_s,
                    compute_s / found.step_s, compute_s / worst, compute_s / best,
                    steps, steps * self.mean_s(found.seconds, loaded=True), not settings.keeps, False,
                )
            )  # fmt: skip
        fastest = min((row for row in rows if row.ours), key=lambda row: row.step_s, default=None)
        return [replace(row, chosen=row is fastest) for row in rows]


@cache
def _sides(data: Data, images: int, global_batch: int, epochs: int) -> Counter[int]:
    each = images // global_batch
    if not isinstance(data, ImageData) or not data.sizes:
        return Counter({data.image_size: epochs * each})
    order, none = TrainSampler(images, Batching(1, global_batch, 1), 0, 0), np.empty(0, np.int64)
    steps = (BatchIndices(epoch, none, step / each) for epoch in range(epochs) for step in range(each))
    return Counter(resolution(data, order, batch).size for batch in steps)


def situation_of(written: Recipe, cluster: Cluster, gpus: int, scaling: Scaling) -> Situation:
    """Return a recipe on ``gpus`` GPUs; kept is each one's share of the batch (weak), or the global batch (strong).

    Raises:
        UserError: The batch does not divide, or it is larger than the training set.
    """
    if written.parallel.ranks > 1:
        raise UserError("plan predicts data parallelism alone; --set parallel.tensor=1 and parallel.pipeline=1")
    recipe = written if scaling == "strong" else scale_recipe(written, gpus)
    batching, images = split_batch(recipe, gpus), training_images(recipe)
    if images < batching.global_batch:
        strong = ", or --scaling strong" if scaling == "weak" else ""
        raise UserError(
            f"{gpus} GPUs have a global batch of {batching.global_batch}, more than the {images} training images; take "
            f"fewer GPUs or a smaller --set global_batch{strong}"
        )
    return Situation(recipe, cluster, batching)


def training_images(recipe: Recipe) -> int:
    """Return the number of training images of the recipe's data."""
    dataset = getattr(recipe.data, "dataset", None)
    return IMAGES[dataset] if dataset in IMAGES else int(getattr(recipe.data, "train_images", IMAGES["imagenet"]))
