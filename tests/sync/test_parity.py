"""Training with an engine is training on the joined batch, also of networks of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
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
from imagenet_fast.sync import EngineSettings
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.given import Given, integers, weights_of, with_ranks
from tests.sync.loops import trained

BATCH = 24
SGD = Sgd(kind="sgd", lr=0.02, weight_decay=1e-4)
own_sgd = partial(build_optimizer, SGD)


def exact(mb: float) -> dict[str, EngineSettings]:
    """Every exact engine, with messages of so many MiB where it does not choose."""
    return {
        "allreduce": sync.AllReduceSync(wire="fp32", collective="pairwise"),
        "allreduce fused": sync.AllReduceSync(wire="fp32", fused=True),
        "ring": sync.RingSync(wire="fp32", bucket_mb=mb),
        "lazy": sync.LazySync(wire="fp32", threshold_mb=mb),
        "hybrid": sync.HybridSync(wire="fp32", fuse_mb=mb),
        "hybrid by size": sync.HybridSync(wire="fp32", policy="by-size"),
        "dear": sync.DearSync(wire="fp32", bucket_mb=mb),
        "auto": sync.AutoSync(wire="fp32"),
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
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is decays] for decays in (True, False))
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=SGD.lr, momentum=0.9)
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

    trained(settings, convnet, loss, own_sgd, steps)
    mean = torch.stack(seen)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


@pytest.mark.ci
@pytest.mark.parametrize(("world", "name"), [(1, "hybrid"), (2, "hybrid"), *((3, name) for name in [*NAMES, "ddp"])])
def test_exact_engines_follow_one_process_on_the_joined_batch(world: int, name: str):
    settings = (exact(0.01) | {"ddp": sync.DdpSync()})[name]
    assert run(world, _losses, settings, 100)[0] == pytest.approx(joined(100), rel=5e-5)


WHOLE = [(world, name) for world in (2, 3) for name in NAMES if name not in ("hybrid by size", "auto")]


@pytest.mark.ci
@pytest.mark.parametrize(("world", "name"), WHOLE)
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
    weights = trained(settings, whole_model, loss, own_sgd, 100)
    return torch.cat([weights[name].flatten() for name, _ in whole_model().named_parameters()])


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


def images_loss(pixels: int) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        images = torch.randn(4, 3, pixels, pixels, generator=generator)
        return F.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=generator))

    return loss


FAMILIES = {"mobilenet": (mobilenet, 64, 4, 1.0), "vit": (vit, 32, 8, 0.02), "swin": (swin, 64, 8, 0.02)}
"""A network, the pixels that it is trained on, and how many steps and with what messages it is."""


BY_FAMILY = [
    pytest.param(family, name, marks=pytest.mark.ci if number % 3 == 0 else pytest.mark.weekly)
    for number, (name, family) in enumerate(product([name for name in NAMES if name != "allreduce fused"], FAMILIES))
]


@pytest.mark.parametrize(("family", "name"), BY_FAMILY)
@with_ranks(3)
@by_links
def test_a_model_of_any_family_trains_as_by_hand(family: str, name: str) -> None:
    """In weights and in each rank's own statistics; eight steps are enough for plans to be made and used."""
    build, pixels, steps, mb = FAMILIES[family]
    loss = images_loss(pixels)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return build()

    sgd = lambda model: torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=1e-3)  # noqa: E731
    expected, weights = (trained(settings, network, loss, sgd, steps) for settings in (None, exact(mb)[name]))
    moved = [bool((expected[param] - begun).abs().max() > 1e-4) for param, begun in network().named_parameters()]
    assert sum(moved) > 0.85 * len(moved), "else there is nothing to see"
    for param, tensor in expected.items():
        torch.testing.assert_close(weights[param], tensor, rtol=1e-4, atol=1e-4, msg=param)
