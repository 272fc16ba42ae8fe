"""Training with an engine is training on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from imagenet_fast.optim import build_optimizer
from imagenet_fast.recipe import AllReduceSync, DdpSync, LazySync, Sgd
from imagenet_fast.sync import attach
from tests.ranks import run

STEPS, BATCH = 20, 24


def convnet() -> nn.Module:
    """No batch norm, whose statistics are a rank's own by design."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 25, 10)
    )
    return model.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 15, 15, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def trained(model: nn.Module, settings: AllReduceSync | DdpSync | LazySync, rank: int, world: int) -> list[float]:
    forward, sync = attach(model, settings)
    optimizer = build_optimizer(Sgd(kind="sgd", lr=0.05, weight_decay=1e-4), model)
    losses = []
    for step in range(STEPS):
        images, labels = (t.chunk(world)[rank] for t in batch(step))
        sync.zero_grad()
        loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        sync.finish()
        optimizer.step(0.05)
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / world).tolist()


def joined() -> list[float]:
    model = convnet()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 1e-4},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lr=0.05,
        momentum=0.9,
    )
    losses = []
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_engine_follows_one_process_on_the_joined_batch(world: int):
    expected = joined()
    for name, losses in run(world, _every_engine)[0].items():
        rel = 1e-5 if "fp32" in name else 2e-2
        assert losses == pytest.approx(expected, rel=rel), name


def _every_engine() -> dict[str, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for wire in ("fp32", "bf16", "fp16"):
        for settings in (DdpSync(wire=wire), AllReduceSync(wire=wire), LazySync(wire=wire, threshold_mb=0.01)):
            results[f"{settings.kind} {wire}"] = trained(copy.deepcopy(convnet()), settings, rank, world)
    return results


def test_the_pool_trains_a_small_transformer_without_the_rest():
    """The example in the README, as a library user would write it."""
    first, last = run(2, _transformer)[0]
    assert last < 0.5 * first


def _transformer() -> tuple[float, float]:
    from imagenet_fast.sync import GradientPool, LazySync, build_engine

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pool = GradientPool(model.named_parameters())
    pool.attach(build_engine(LazySync(wire="bf16"), pool))
    losses = []
    for step in range(60):  # learn to reverse a sequence
        tokens = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        pool.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (15 - tokens).flatten())
        loss.backward()
        pool.finish()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(others, weights)
    assert torch.equal(others[0], others[1])
    return losses[0], losses[-1]
