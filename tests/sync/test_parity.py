"""Training with an engine is training on the joined batch, of networks of torchvision and of hostile ones as well."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    EngineSettings,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
)
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.given import Given, integers, on_ranks, pooled, tiers, weights_of
from tests.sync.loops import trained

BATCH = 24
SGD = Sgd(kind="sgd", lr=0.02, weight_decay=1e-4)
own_sgd = partial(build_optimizer, SGD)


def exact(mb: float) -> dict[str, EngineSettings]:
    """Every exact engine, with messages of so many MiB where it does not choose."""
    return {
        "allreduce": AllReduceSync(wire="fp32", collective="pairwise"),
        "allreduce fused": AllReduceSync(wire="fp32", fused=True),
        "ring": RingSync(wire="fp32", bucket_mb=mb),
        "lazy": LazySync(wire="fp32", threshold_mb=mb),
        "hybrid": HybridSync(wire="fp32", fuse_mb=mb),
        "hybrid by size": HybridSync(wire="fp32", policy="by-size"),
        "dear": DearSync(wire="fp32", bucket_mb=mb),
        "auto": AutoSync(wire="fp32"),
    }


NAMES = [*exact(0.0)]


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
def joined(steps: int) -> list[float]:
    """Losses of one process, by torch's own optimizer."""
    model = convnet()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 1e-4},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lr=SGD.lr,
        momentum=0.9,
    )
    losses = []
    for step in range(steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LINKS = {"butterfly": LinkModel(1e-5, 1e-8)}
by_links = patch(
    "imagenet_fast.sync.network_benchmark.measure_link", lambda name, *_: LINKS.get(name, LinkModel(1e-4, 1e-9))
)


@by_links
def _losses(settings: Sync, steps: int) -> list[float]:
    """Mean loss of each step."""
    seen = []

    def loss(model: nn.Module, step: int) -> Tensor:
        images, labels = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(step))
        loss = F.cross_entropy(model(images), labels)
        seen.append(loss.detach())
        return loss

    trained(settings, convnet, loss, optimizer_of=own_sgd, steps=steps)
    mean = torch.stack(seen)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


@pytest.mark.ci
@pytest.mark.parametrize(("world", "name"), [(1, "hybrid"), (2, "hybrid"), *((3, name) for name in [*NAMES, "ddp"])])
def test_exact_engines_follow_one_process_on_the_joined_batch(world: int, name: str):
    settings = (exact(0.01) | {"ddp": DdpSync()})[name]
    assert run(world, _losses, settings, 100)[0] == pytest.approx(joined(100), rel=5e-5)


@pytest.mark.ci
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [DdpSync, AllReduceSync, LazySync, HybridSync, DearSync])
def test_16_bit_wires_stay_near_it(kind: Callable[..., Sync], wire: str):
    assert run(2, _losses, kind(wire=wire), 20)[0] == pytest.approx(joined(20), rel=2e-2)


WHOLE = [(world, name) for world in (2, 3) for name in NAMES if name not in ("hybrid by size", "auto")]


@pytest.mark.parametrize(("world", "name"), tiers([(2, "dear")], WHOLE))
def test_with_integer_gradients_100_steps_agree_to_the_bit(world: int, name: str):
    model = whole_model()
    shapes = [param.shape for param in model.weights]
    optimizer = own_sgd(model)
    for step in range(100):
        everyone = [integers(shapes, step, rank, world) for rank in range(world)]
        for param, *parts in zip(model.weights, *everyone, strict=True):
            param.grad = sum(parts) / world
        optimizer.step()
    weights = run(world, _integer_steps, name, "bf16" if world == 3 else "fp32")[0]
    assert torch.equal(weights, weights_of(model))


def whole_model() -> Given:
    model = Given([(5, 3, 3, 3)], [(7, 5, 3, 3)], [(17, 31)], [(3, 17)])
    torch.manual_seed(0)
    for param in model.weights:
        nn.init.normal_(param)
    return model


def _integer_steps(name: str, wire: str) -> Tensor:
    def loss(model: Given, step: int) -> Tensor:
        return model(integers([p.shape for p in model.weights], step, dist.get_rank(), dist.get_world_size()))

    settings = exact(0.01)[name].model_copy(update={"wire": wire})
    weights = trained(settings, whole_model, loss, optimizer_of=own_sgd, steps=100)
    return torch.cat([weights[name].flatten() for name, _ in whole_model().named_parameters()])


@pytest.mark.ci
@pytest.mark.parametrize("settings", [LazySync(), HybridSync(), PowerSgdSync(timing="dear")], ids=lambda s: s.kind)
def test_a_transformer_trains_with_an_optimizer_and_a_schedule_of_torch(settings: EngineSettings):
    """The example in the README, as a library user would write it."""
    (begun, ended, weights), (*_, others) = on_ranks(2, _transformer, settings)
    assert ended < 0.5 * begun
    assert torch.equal(weights, others)


def _transformer(settings: EngineSettings) -> tuple[float, float, Tensor]:
    model = transformer()
    pool = pooled(model, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=61)
    losses = []
    for step in range(60):
        pool.zero_grad()
        loss = reversal_loss(model, step)
        loss.backward()
        pool.step(optimizer)
        scheduler.step()
        losses.append(loss.item())
    return losses[0], losses[-1], torch.cat([values.flatten() for values in model.state_dict().values()])


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16))


def reversal_loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    return F.cross_entropy(model(tokens).flatten(0, 1), (15 - tokens).flatten())


WAYS = [("put off", "settled", 0), ("hooked", "finished before", 8)]


@pytest.mark.parametrize(("one", "other", "hooks"), tiers(WAYS[:1], WAYS))
def test_a_step_of_torchs_optimizers_is_the_same_put_off_as_at_once(one: str, other: str, hooks: int):
    """To the bit, in weights and in the optimizer's state; with a hook it is taken at once, and the hook runs once."""
    for (weights, hooked), (others, _) in zip(on_ranks(2, _stepped, one), on_ranks(2, _stepped, other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
        assert hooked == hooks


def _stepped(way: str) -> tuple[list[Tensor], int]:
    """Weights and moments."""
    model = transformer()
    pool = pooled(model, HybridSync(wire="fp32", fuse_mb=0.01))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hooked: list[object] = []
    if way == "hooked":
        optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(8):
        pool.zero_grad()
        reversal_loss(model, step).backward()
        if way == "finished before":
            stats = pool.end_backward()
            assert pool.step(optimizer) is stats
        else:
            pool.step(optimizer)
        scheduler.step()
        if way == "settled":
            pool.settle()
        elif step == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = optimizer.state_dict()["state"]
    kept = [moments[number][name] for number in sorted(moments) for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*(param.detach() for param in model.parameters()), *kept], len(hooked)


def mobilenet() -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=10, dropout=0.0).to(memory_format=torch.channels_last)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


def swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        [4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.0,
        num_classes=10,
    )  # fmt: skip


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


def hostile(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of the elder of weight norms
        model = Hostile().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    if dtype == torch.bfloat16:  # of which torch cannot make all matrices orthogonal
        nn.utils.parametrize.remove_parametrizations(model.orthogonal, "weight")
        model.to(dtype)
    return model


def tokens_loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return F.cross_entropy(model(tokens, (dist.get_rank() + step) % 3 == 0).flatten(0, 1), tokens.flatten())


def images_loss(pixels: int) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        images = torch.randn(4, 3, pixels, pixels, generator=generator)
        return F.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=generator))

    return loss


@dataclass(frozen=True)
class Family:
    """A network, what it is trained on and how, by how many ranks, and how near it is to that."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    world: int = 3
    steps: int = 8
    mb: float = 0.02
    sgd: tuple[float, float] = (0.2, 1e-3)  # rate and decay
    near: float = 1e-4


FAMILIES = {
    "mobilenet": Family(mobilenet, images_loss(64), steps=4, mb=1.0),
    "vit": Family(vit, images_loss(32)),
    "swin": Family(swin, images_loss(64)),
    "hostile": Family(partial(hostile, torch.float32), tokens_loss, 2, mb=0.01, sgd=(0.05, 1e-2), near=1e-5),
    "hostile float64": Family(partial(hostile, torch.float64), tokens_loss, 2, mb=0.01, sgd=(0.05, 1e-2), near=1e-6),
    "hostile bfloat16": Family(partial(hostile, torch.bfloat16), tokens_loss, 2, mb=0.01, sgd=(0.05, 1e-2), near=2e-2),
}
CASES = [
    (family, name)
    for family in FAMILIES
    for name in (["dear"] if " " in family else NAMES)
    if name != "allreduce fused"
]


@pytest.mark.ci
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_model_of_any_family_trains_as_by_hand(family: str, name: str):
    """In weights and in each rank's own statistics; eight steps are enough for plans to be made and used."""
    run(FAMILIES[family].world, _as_by_hand, family, name)


@by_links
def _as_by_hand(of: str, name: str) -> None:
    family = FAMILIES[of]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return family.build()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), family.sgd[0], momentum=0.9, weight_decay=family.sgd[1])

    expected, weights = (
        trained(settings, build, family.loss, optimizer_of=sgd, steps=family.steps)
        for settings in (None, exact(family.mb)[name])
    )
    moved = []
    for param, begun in build().named_parameters():
        if param.startswith(("of_none", "frozen")):
            assert torch.equal(expected[param], begun), param
        else:
            moved.append(float((expected[param] - begun).abs().max() > 1e-4))
    assert sum(moved) > 0.85 * len(moved), "else there is nothing to see"
    for param, tensor in expected.items():
        torch.testing.assert_close(weights[param], tensor, rtol=family.near, atol=family.near, msg=param)
