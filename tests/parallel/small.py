"""Small models with fully connected layers to shard, and what is trained with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests
from imagenet_fast.distributed.process_groups import build_mesh
from imagenet_fast.metrics import Event, MetricLogger
from imagenet_fast.models.alexnet import AlexNet, CompilableSequential
from imagenet_fast.recipe import schema
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.train_step import build_step
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
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def small_model(kind: str) -> nn.Module:
    """With the same weights at every call: ``tiny``, ``resnet18``, ``cifarnet``, or an AlexNet with 256 units."""
    torch.manual_seed(0)
    match kind:
        case "tiny":
            return Tiny()
        case "resnet18":
            return narrow_model(schema.ResNet(kind="resnet18"), CLASSES)
        case "cifarnet":
            return narrow_model(schema.CifarNet(kind="cifarnet", widths=(4, 5, 6)), CLASSES)
        case "alexnet":
            return narrow_model(schema.AlexNet(kind="alexnet", dropout=0.0), CLASSES)
        case _:
            return narrow_model(schema.AlexNetBN(kind="alexnet_bn", dropout=0.0), CLASSES)


UNDIVIDED = Parallel()
PIXELS = {"tiny": 5, "alexnet": 63, "alexnet_bn": 67, "resnet18": 96, "cifarnet": 32}


def images_of(kind: str, step: int, batch: int) -> tuple[Tensor, Tensor]:
    """The joined batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(batch, PIXELS[kind], PIXELS[kind], 3, generator=generator).permute(0, 3, 1, 2)
    return pixels, torch.randint(0, CLASSES, (batch,), generator=generator)


@dataclass
class Trained:
    """What came of some steps: the loss of each over all ranks, and on the first rank what would be saved."""

    losses: list[float]
    weights: dict[str, Tensor]


@unmeasured()
@patch("imagenet_fast.parallel.parallelize.build_mesh", cache(build_mesh))
def train(
    kind: str, steps: int, batch: int, lr: float = 0.1, parallel: Parallel = UNDIVIDED, micro: int = 2, **changes: Any
) -> Trained:
    """On this rank and all others, by :func:`build_step`, over the same two batches again and again, in micro-batches
    of ``micro`` images. ``changes`` are the recipe's; ``parallel`` need not fit its own model. Of a layout groups are
    made once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = {"model": {"kind": "resnet18" if kind == "tiny" else kind}, "data__image_size": 67}
    recipe = parse_recipe("test", tables(**model, ranks=1, global_batch=batch, micro_batch=micro, **changes))
    data = recipe.data.model_copy(update={"image_size": PIXELS[kind]})
    recipe = recipe.model_copy(update={"parallel": parallel, "data": data})
    batching = split_batch(recipe, ranks)
    take_step = build_step(recipe, batching, small_model(kind), tests.world(rank, ranks), 4)
    seen = Seen()
    record = MetricLogger(lambda: 0.0, [seen])
    for step in range(steps):
        images, labels = (
            t.unflatten(0, (batching.readers, batching.accumulation, batching.micro_batch))[rank % batching.readers]
            for t in images_of(kind, step % 2, batch)
        )
        take_step(zip(images, labels, strict=True), lr)
        take_step.meter.report(record, step, 1, lr)
    take_step.state.settle()
    weights = {name: tensor.clone() for name, tensor in take_step.state.whole().state_dict().items()}
    for name, tensor in weights.items():
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor) or "running" in name, f"{name} differs between ranks"
    take_step.state.sync.close()  # else the groups of all cases are open, and their threads wake
    return Trained(seen.losses, weights if rank == 0 else {})


class Seen:
    """A sink that keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def write(self, event: Event) -> None:
        if event.name == "train":
            self.losses.append(event.values["loss"])

    def close(self) -> None: ...
