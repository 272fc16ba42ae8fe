"""Networks of torchvision, and hostile ones, train under every exact engine as under DDP or by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    HybridSync,
    LazySync,
    RingSync,
)
from tests.ranks import run
from tests.sync.loops import state, trained


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
def test_families_train_as_under_ddp(family: Callable[[], nn.Module], pixels: int, steps: int, mb: float):
    """In weights and in each rank's own statistics; eight steps are enough for plans to be made and used."""
    statistics = run(3, _as_under_ddp, family, pixels, steps, mb)
    assert len(set(statistics)) == (3 if family is mobilenet else 1), "batch norms are a rank's own"


@patch("imagenet_fast.sync.network_benchmark.measure_link", lambda name, *_: LINKS.get(name, LinkModel(1e-4, 1e-9)))
def _as_under_ddp(family: Callable[[], nn.Module], pixels: int, steps: int, mb: float) -> float:
    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        images = torch.randn(4, 3, pixels, pixels, generator=generator)
        return F.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=generator))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)

    build = partial(seeded, family)
    begun, expected = state(build()), trained(DdpSync(), build, loss, optimizer_of=sgd, steps=steps)
    moved = torch.stack([(expected[name] - begun[name]).abs().max() for name, _ in family().named_parameters()])
    assert (moved > 1e-4).float().mean() > 0.85, "else there is nothing to see"
    for settings in exact(mb):
        weights = trained(settings, build, loss, optimizer_of=sgd, steps=steps)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-4, msg=f"{settings}: {name}")
    return sum(float(tensor.sum()) for name, tensor in expected.items() if "running" in name)


def seeded(family: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return family()


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
        build = partial(hostile, dtype)
        expected = trained(None, build, tokens_loss, optimizer_of=decaying, steps=8)
        start = dict(build().named_parameters())
        names = list(start)
        for name in names:
            stays = name.startswith(("of_none", "frozen"))
            assert torch.equal(expected[name], start[name]) is stays, f"{name} has {'' if stays else 'not '}moved"
        for settings in exact(0.01) if dtype == torch.float32 else exact(0.01)[5:6]:
            weights = trained(settings, build, tokens_loss, optimizer_of=decaying, steps=8)
            for name in names:
                torch.testing.assert_close(
                    weights[name], expected[name], rtol=near, atol=near, msg=f"{settings}: {name}"
                )


def hostile(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Hostile().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    if dtype == torch.bfloat16:  # of which torch cannot make all matrices orthogonal
        nn.utils.parametrize.remove_parametrizations(model.orthogonal, "weight")
        model.to(dtype)
    return model


def tokens_loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return F.cross_entropy(model(tokens, (dist.get_rank() + step) % 3 == 0).flatten(0, 1), tokens.flatten())


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
