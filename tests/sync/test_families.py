"""Networks of torchvision, and hostile ones, train under every exact engine as under DDP or by hand."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer, mobilenet_v3_small
from torchvision.models.swin_transformer import SwinTransformer

from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    RingSync,
    attach,
    build_engine,
)
from tests.spawning import run
from tests.sync.loops import lending


def exact(mb: float) -> tuple[EngineSettings, ...]:
    """Every exact engine, with messages of so many MiB where it does not choose."""
    return (
        AllReduceSync(wire="fp32", collective="pairwise"),
        RingSync(wire="fp32", bucket_mb=mb),
        LazySync(wire="fp32", threshold_mb=mb),
        HybridSync(wire="fp32", fuse_mb=mb),
        HybridSync(wire="fp32", policy="by-size"),
        DearSync(wire="fp32", bucket_mb=mb),
        AutoSync(wire="fp32"),
    )


LINKS = {"butterfly": LinkModel(1e-5, 1e-8)}


def mobilenet() -> nn.Module:
    return mobilenet_v3_small(num_classes=10, dropout=0.0).to(memory_format=torch.channels_last)


def vit() -> nn.Module:
    return VisionTransformer(32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


def swin() -> nn.Module:
    return SwinTransformer(
        [4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.0,
        num_classes=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "pixels", "steps", "mb"), [(mobilenet, 64, 4, 1.0), (vit, 32, 8, 0.02), (swin, 64, 8, 0.02)]
)
def test_it_trains_as_under_ddp(family: Callable[[], nn.Module], pixels: int, steps: int, mb: float):
    """In weights and in each rank's own statistics; eight steps are enough for plans to be made and used."""
    statistics = run(3, _as_under_ddp, family, pixels, steps, mb)
    assert len(set(statistics)) == (3 if family is mobilenet else 1), "batch norms are a rank's own"


@patch("imagenet_fast.sync.network_benchmark.measure_link", lambda name, *_: LINKS.get(name, LinkModel(1e-4, 1e-9)))
def _as_under_ddp(family: Callable[[], nn.Module], pixels: int, steps: int, mb: float) -> float:
    begun, expected = trained(family, DdpSync(), pixels, steps)
    moved = torch.stack([(expected[name] - begun[name]).abs().max() for name, _ in family().named_parameters()])
    assert (moved > 1e-4).float().mean() > 0.85, "else there is nothing to see"
    for settings in exact(mb):
        _, weights = trained(family, settings, pixels, steps)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-4, msg=f"{settings}: {name}")
    return sum(float(tensor.sum()) for name, tensor in expected.items() if "running" in name)


def trained(
    family: Callable[[], nn.Module], settings: EngineSettings | DdpSync, pixels: int, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of the model, before and after."""
    torch.manual_seed(0)
    model = family()
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward, sync = attach(model, settings, topology=lending())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        images = torch.randn(4, 3, pixels, pixels, generator=generator)
        labels = torch.randint(0, 10, (4,), generator=generator)
        sync.zero_grad()
        F.cross_entropy(forward(images), labels).backward()
        if isinstance(sync, GradientPool):
            sync.step(optimizer)
        else:
            optimizer.step()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sync.close()
    return begun, tensors


class Hostile(nn.Module):
    """All that a parameter can be besides the weight of a module that is called once."""

    def __init__(self) -> None:
        super().__init__()
        size = 16
        self.tied = nn.Embedding(12, size)
        self.twice = nn.Linear(size, size)
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.weight_norm = weight_norm(nn.Linear(size, size))
        self.parametrized = parametrizations.weight_norm(nn.Linear(size, size))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(size, size, bias=False))
        self.convolution = nn.Conv2d(size, size, 3, padding=1).to(memory_format=torch.channels_last)
        self.recurrent = nn.LSTM(size, size, batch_first=True)
        self.checkpointed = nn.Sequential(nn.Linear(size, size), nn.ReLU())
        self.reentrant = nn.Sequential(nn.Linear(size, size), nn.ReLU())
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.transposed = nn.Parameter(torch.randn(4, size).t())
        self.of_some_ranks = nn.Linear(size, size)
        self.of_none = nn.Linear(size, size)
        self.frozen = nn.Linear(size, size).requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))

    def forward(self, tokens: Tensor, used: bool) -> Tensor:
        x = self.tied(tokens)
        x = x + self.twice(self.twice(x).relu())
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norms[0](x + self.weight_norm(x) + self.parametrized(x) * self.scalar)
        x = x + self.convolution(self.orthogonal(x)[..., None].transpose(1, 2)).squeeze(-1).transpose(1, 2)
        x = x + self.recurrent(x)[0] + self.frozen(x)
        x = (
            x
            + checkpoint(self.checkpointed, x, use_reentrant=False)
            + checkpoint(self.reentrant, x, use_reentrant=True)
        )
        x = x + (x @ self.transposed) @ self.transposed.t()
        if used:
            x = x + self.of_some_ranks(x)
        return F.linear(self.norms[1](x), self.tied.weight)


def test_hostile_models_train_as_by_hand():
    run(2, _as_by_hand)


@patch("imagenet_fast.sync.network_benchmark.measure_link", lambda name, *_: LINKS.get(name, LinkModel(1e-4, 1e-9)))
def _as_by_hand() -> None:
    for dtype, near in ((torch.float32, 1e-5), (torch.float64, 1e-6), (torch.bfloat16, 2e-2)):
        expected = hostile(None, dtype)
        start = dict(seeded(dtype).named_parameters())
        for name, weight in expected.items():
            stays = name.startswith(("of_none", "frozen"))
            assert torch.equal(weight, start[name]) is stays, f"{name} has {'' if stays else 'not '}moved"
        for settings in exact(0.01) if dtype == torch.float32 else exact(0.01)[5:6]:
            for name, weight in hostile(settings, dtype).items():
                torch.testing.assert_close(weight, expected[name], rtol=near, atol=near, msg=f"{settings}: {name}")


def seeded(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Hostile().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    if dtype == torch.bfloat16:  # of which torch cannot make all matrices orthogonal
        nn.utils.parametrize.remove_parametrizations(model.orthogonal, "weight")
        model.to(dtype)
    return model


def hostile(settings: EngineSettings | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters after eight steps under an engine; without one, by plain all-reduces."""
    model = seeded(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    pool = None
    if settings is not None:
        pool = GradientPool(model, topology=lending())
        pool.attach(build_engine(settings, pool))
    for step in range(8):
        tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        (pool or optimizer).zero_grad()
        loss = F.cross_entropy(model(tokens, (dist.get_rank() + step) % 3 == 0).flatten(0, 1), tokens.flatten())
        loss.backward()
        if pool is not None:
            pool.step(optimizer)
        else:
            average(model)
            optimizer.step()
    parameters = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    if pool is not None:
        pool.close()
    return {name: parameters[name] for name, _ in model.named_parameters()}


def average(model: nn.Module) -> None:
    """Every gradient that some rank has, one after the other."""
    for param in model.parameters():
        users = torch.tensor(float(param.grad is not None))
        dist.all_reduce(users)
        if users:
            mean = torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
            dist.all_reduce(mean)
            param.grad = (mean / dist.get_world_size()).to(param.dtype)
