"""Training with an engine is training on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast import sync
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import with_ranks
from tests.sync.given import Given, integers, mean_over_ranks, weights_of
from tests.sync.loops import synced

BATCH, STEPS, MB = 24, 100, 0.01
SGD = Sgd(kind="sgd", lr=0.02, weight_decay=1e-4)
EXACT: dict[str, Sync] = {
    "allreduce": sync.AllReduceSync(wire="fp32", collective="pairwise"),
    "allreduce fused": sync.AllReduceSync(wire="fp32", fused=True),
    "ring": sync.RingSync(wire="fp32", bucket_mb=MB),
    "lazy": sync.LazySync(wire="fp32", threshold_mb=MB),
    "hybrid": sync.HybridSync(wire="fp32", fuse_mb=MB),
    "hybrid by size": sync.HybridSync(wire="fp32", policy="by-size"),
    "dear": sync.DearSync(wire="fp32", bucket_mb=MB),
    "auto": sync.AutoSync(wire="fp32"),
    "ddp": sync.DdpSync(),
}


def train(model: nn.Module, settings: Sync, loss: Callable[[nn.Module, int], Tensor]) -> None:
    forward, synchroniser = synced(model, settings)
    optimizer = build_optimizer(SGD, model)
    for step in range(STEPS):
        synchroniser.zero_grad()
        loss(forward, step).backward()
        synchroniser.step(optimizer)
    synchroniser.close()


def convnet() -> nn.Sequential:
    """No batch norm, whose statistics are a rank's own by design."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 25, 10)
    )
    return model.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 15, 15, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


@cache
def joined() -> list[float]:
    """Losses of one process, by torch's own optimizer."""
    model, losses = convnet(), []
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is decays] for decays in (True, False))
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=SGD.lr, momentum=0.9)
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def link(name: str, *_: object) -> LinkModel:
    return LinkModel(1e-5, 1e-8) if name == "butterfly" else LinkModel(1e-4, 1e-9)


@pytest.mark.ci
@pytest.mark.parametrize(("world", "name"), [(1, "hybrid"), (2, "hybrid"), *((3, name) for name in EXACT)])
@with_ranks()
@patch("imagenet_fast.sync.network_benchmark.measure_link", link)
def test_exact_engines_follow_one_process_on_the_joined_batch(world: int, name: str) -> None:
    losses: list[Tensor] = []

    def loss(model: nn.Module, step: int) -> Tensor:
        images, labels = (t.chunk(world)[dist.get_rank()] for t in batch(step))
        losses.append(F.cross_entropy(model(images), labels))
        return losses[-1]

    train(convnet(), EXACT[name], loss)
    assert mean_over_ranks(torch.stack(losses).detach()).tolist() == pytest.approx(joined(), rel=5e-5)


def whole_model() -> Given:
    model = Given([(5, 3, 3, 3)], [(7, 5, 3, 3)], [(17, 31)], [(3, 17)])
    torch.manual_seed(0)
    for param in model.weights:
        nn.init.normal_(param)
    return model


WHOLE = [name for name in EXACT if name not in ("hybrid by size", "auto", "ddp")]


@pytest.mark.ci
@pytest.mark.parametrize(("world", "name"), [*product((2, 3), WHOLE)])
@with_ranks()
def test_with_integer_gradients_100_steps_agree_to_the_bit(world: int, name: str) -> None:
    """Three ranks send 16 bits, which hold these."""
    model, alone = whole_model(), whole_model()
    shapes = [param.shape for param in model.weights]
    settings = EXACT[name].model_copy(update={"wire": "bf16" if world == 3 else "fp32"})
    train(model, settings, lambda forward, step: forward(integers(shapes, step, dist.get_rank(), world)))
    optimizer = build_optimizer(SGD, alone)
    for step in range(STEPS):
        everyone = [integers(shapes, step, rank, world) for rank in range(world)]
        for param, *parts in zip(alone.weights, *everyone, strict=True):
            param.grad = sum(parts) / world
        optimizer.step()
    assert torch.equal(weights_of(model), weights_of(alone))
