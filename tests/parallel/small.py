"""Small models with fully connected layers to shard, and what is trained with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests
from imagenet_fast.metrics.events import Event, MetricLogger
from imagenet_fast.models.alexnet import AlexNet, CompilableSequential
from imagenet_fast.recipe import schema
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.training_step import TrainingStep, build_step
from tests.conftest import tables
from tests.models.narrow import narrow_model
from tests.sync.loops import unmeasured

CLASSES = 5
CPU = torch.device("cpu")


class Tiny(AlexNet):
    """AlexNet's build in small: features in channels_last memory, then three fully connected layers of 12 units."""

    def __init__(self, dropout: float = 0.0, units: int = 12) -> None:
        nn.Module.__init__(self)
        self.features = CompilableSequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)).to(
            memory_format=torch.channels_last
        )
        self.classifier = CompilableSequential(
            nn.Dropout(dropout), nn.Linear(4 * 3 * 3, units), nn.ReLU(inplace=True),
            nn.Dropout(dropout), nn.Linear(units, units), nn.ReLU(inplace=True), nn.Linear(units, CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def small_model(kind: str) -> nn.Module:
    """With the same weights at every call: ``tiny``, ``resnet18``, ``cifarnet``, or an AlexNet with 256 units."""
    torch.manual_seed(0)
    return Tiny() if kind == "tiny" else narrow_model(MODELS[kind], CLASSES)


MODELS: dict[str, schema.Model] = {
    "resnet18": schema.ResNet(kind="resnet18", blurpool="conv_maxpool"),
    "cifarnet": schema.CifarNet(kind="cifarnet", widths=(4, 5, 6)),
    "alexnet": schema.AlexNet(kind="alexnet", dropout=0.0),
    "alexnet_bn": schema.AlexNetBN(kind="alexnet_bn", dropout=0.0),
}
UNDIVIDED = Parallel()
PIXELS = {"tiny": 5, "alexnet": 63, "alexnet_bn": 67, "resnet18": 96, "cifarnet": 32}


def images_of(kind: str, step: int, batch: int) -> tuple[Tensor, Tensor]:
    """The joined batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(batch, PIXELS[kind], PIXELS[kind], 3, generator=generator).permute(0, 3, 1, 2)
    return pixels, torch.randint(0, CLASSES, (batch,), generator=generator)


class Loop:
    """A recipe's training steps on this rank, over the images of ``images_of``, whatever the recipe's own are."""

    def __init__(self, kind: str, parallel: Parallel = UNDIVIDED, **changes: Any) -> None:
        small = {"reference_ranks": 1, "micro_batch": 2, "data__image_size": 67}
        recipe = parse_recipe("test", tables(**(small | changes)))
        data = recipe.data.model_copy(update={"image_size": PIXELS[kind]})
        self.recipe = recipe.model_copy(update={"parallel": parallel, "data": data})
        self.kind, self.world = kind, tests.world()
        own = MODELS.get(kind, MODELS["alexnet"])  # one without norms, as the tiny one
        self.batching = split_batch(self.recipe.model_copy(update={"model": own}), self.world.size)

    def begin(self, model: nn.Module) -> TrainingStep:
        return build_step(self.recipe, self.batching, model, self.world, 4)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step."""
        shape = (self.batching.readers, self.batching.accumulation, self.batching.micro_batch)
        images, labels = (
            joined.unflatten(0, shape)[self.world.rank % self.batching.readers]
            for joined in images_of(self.kind, step, self.recipe.global_batch)
        )
        return zip(images, labels, strict=True)


@dataclass
class Trained:
    """What came of some steps: the loss of each over all ranks, and on the first rank what would be saved."""

    losses: list[float]
    weights: dict[str, Tensor]


@unmeasured()
def train(kind: str, steps: int, lr: float = 0.1, parallel: Parallel = UNDIVIDED, **changes: Any) -> Trained:
    """On this rank and all others, over the same two batches again and again. ``changes`` are the recipe's;
    ``parallel`` need not fit its own model."""
    loop = Loop(kind, parallel, model={"kind": "resnet18" if kind == "tiny" else kind}, **changes)
    take_step, losses = loop.begin(small_model(kind)), list[float]()

    def hear(event: Event) -> None:
        if event["event"] == "train":
            losses.append(event["loss"])

    record = MetricLogger(lambda: 0.0, [hear])
    for step in range(steps):
        take_step(loop.batches(step % 2), lr)
        take_step.meter.report(record, step, 1, lr)
    take_step.state.settle()
    weights = {name: tensor.clone() for name, tensor in take_step.state.whole().state_dict().items()}
    for name, tensor in weights.items():
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor) or "running" in name, f"{name} differs between ranks"
    take_step.state.sync.close()  # else the groups of all cases are open, and their threads wake
    return Trained(losses, weights if loop.world.is_main else {})
