"""Training with an engine is training on the joined batch."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import (
    AllReduceSync,
    DdpSync,
    DearSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    attach,
    build_engine,
)
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.loops import trained

BATCH = 24
SGD = Sgd(kind="sgd", lr=0.02, weight_decay=1e-4)
EXACT: tuple[EngineSettings, ...] = (
    AllReduceSync(wire="fp32"),
    AllReduceSync(wire="fp32", fused=True),
    RingSync(wire="fp32", bucket_mb=0.01),
    LazySync(wire="fp32", threshold_mb=0.01),
    HybridSync(wire="fp32", fuse_mb=0.01),
    DearSync(wire="fp32", bucket_mb=0.01),
)


def convnet() -> nn.Sequential:
    """No batch norm, whose statistics are a rank's own by design."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 25, 10)
    )
    return model.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 15, 15, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


own_sgd = partial(build_optimizer, SGD)


def losses(settings: EngineSettings | DdpSync, steps: int) -> list[float]:
    """Mean loss of each step."""
    seen = []

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images, labels = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(step))
        loss = F.cross_entropy(model(images), labels)
        seen.append(loss.detach())
        return loss

    trained(settings, convnet, loss, optimizer_of=own_sgd, steps=steps)
    mean = torch.stack(seen)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def joined(steps: int) -> list[float]:
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


@pytest.mark.parametrize("world", [1, 3])
def test_exact_engines_follow_one_process_on_the_joined_batch(world: int):
    expected = joined(100)
    for name, found in run(world, _exact_engines)[0].items():
        assert found == pytest.approx(expected, rel=5e-5), name


def _exact_engines() -> dict[str, list[float]]:
    return {settings.kind: losses(settings, 100) for settings in (DdpSync(), *EXACT)}


def test_16_bit_wires_stay_near_it():
    expected = joined(20)
    for name, found in run(2, _short_wires)[0].items():
        assert found == pytest.approx(expected, rel=2e-2), name


def _short_wires() -> dict[str, list[float]]:
    engines = [
        kind(wire=wire)
        for wire in ("bf16", "fp16")
        for kind in (DdpSync, AllReduceSync, LazySync, HybridSync, DearSync)
    ]
    return {repr(settings): losses(settings, 20) for settings in engines}


def test_powersgd_after_dense_steps_sends_less():
    (sent, weights), (_, others) = run(2, _powersgd)
    assert sent[-1] < sent[0] / 5
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert not torch.equal(weights["0.weight"], convnet()[0].weight)


def _powersgd() -> tuple[list[int], dict[str, torch.Tensor]]:
    model = convnet()
    forward, sync = attach(model, DdpSync(wire="fp32", powersgd_rank=1))
    optimizer = build_optimizer(SGD, model)
    sent = []
    for step in range(14):
        images, labels = (t.chunk(2)[dist.get_rank()] for t in batch(step))
        sync.zero_grad()
        F.cross_entropy(forward(images), labels).backward()
        sent.append(sync.step(optimizer).sent_bytes)
    sync.close()
    return sent, model.state_dict()


class Layer(nn.Linear):
    """A fully connected layer whose weight's gradient is what it is given."""

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Kernel(nn.Conv2d):
    """A convolution whose weight's gradient is what it is given."""

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def given() -> nn.ModuleList:
    torch.manual_seed(0)
    kernels = [Kernel(3, 5, 3, bias=False), Kernel(5, 7, 3, bias=False)]
    return nn.ModuleList([*kernels, Layer(31, 17, bias=False), Layer(17, 3, bias=False)])


def integers(rank: int, step: int, shapes: list[torch.Size], world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [world * torch.randint(-8, 8, shape, generator=generator).float() for shape in shapes]


@pytest.mark.parametrize("world", [2, 3])
def test_with_integer_gradients_100_steps_agree_to_the_bit(world: int):
    model = given()
    shapes = [p.shape for p in model.parameters()]
    optimizer = build_optimizer(SGD, model)
    for step in range(100):
        everyone = [integers(rank, step, shapes, world) for rank in range(world)]
        for param, *parts in zip(model.parameters(), *everyone, strict=True):
            param.grad = sum(parts) / world
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for name, weights in run(world, _integer_steps, "bf16" if world == 3 else "fp32")[0].items():
        assert torch.equal(weights, expected), name


def _integer_steps(wire: str) -> dict[str, torch.Tensor]:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        gradients = integers(dist.get_rank(), step, [p.shape for p in model.parameters()], dist.get_world_size())
        return torch.stack([layer(g) for layer, g in zip(model, gradients, strict=True)]).sum()

    results = {}
    for exact in EXACT:
        settings = exact.model_copy(update={"wire": wire})
        weights = trained(settings, given, loss, optimizer_of=own_sgd, steps=100)
        results[repr(settings)] = torch.cat([tensor.flatten() for tensor in weights.values()])
    return results


def test_transformer_with_torch_optimizer_and_schedule():
    """The example in the README, as a library user would write it."""
    engines = (LazySync(), HybridSync(), PowerSgdSync(timing="dear"))
    for settings, first, second in zip(engines, *run(2, _transformers, engines), strict=True):
        begun, ended, weights = first
        assert ended < 0.5 * begun, settings
        assert torch.equal(weights, second[-1]), f"the ranks differ: {settings}"


def _transformers(engines: tuple[EngineSettings, ...]) -> list[tuple[float, float, torch.Tensor]]:
    return [_transformer(settings) for settings in engines]


def _transformer(settings: EngineSettings) -> tuple[float, float, torch.Tensor]:
    model = transformer()
    pool = GradientPool(model)
    pool.attach(build_engine(settings, pool))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=61)
    losses = []
    for step in range(60):
        tokens = sequences(2 * step + dist.get_rank())
        pool.zero_grad()
        loss = reversal_loss(model, tokens)
        loss.backward()
        pool.step(optimizer)
        scheduler.step()
        losses.append(loss.item())
    state = model.state_dict()
    pool.close()
    return losses[0], losses[-1], torch.cat([state[name].flatten() for name in state])


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16))


def sequences(seed: int) -> torch.Tensor:
    return torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(seed))


def reversal_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), (15 - tokens).flatten())


def test_a_step_of_torchs_optimizers_is_the_same_put_off_as_at_once():
    """To the bit, in weights and in the optimizer's state; with a hook it is taken at once, and the hook runs once."""
    for (weights, state, hooked), (others, other_state, _) in run(2, _stepped, ("put off", "settled")):
        _alike(weights, others)
        _alike(state, other_state)
        assert hooked == 0
    for (weights, state, hooked), (others, other_state, _) in run(2, _stepped, ("hooked", "finished before")):
        _alike(weights, others)
        _alike(state, other_state)
        assert hooked == 8


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _stepped(ways: tuple[str, ...]) -> list[tuple[list[torch.Tensor], list[torch.Tensor], int]]:
    results = []
    for way in ways:
        model = transformer()
        pool = GradientPool(model)
        pool.attach(build_engine(HybridSync(wire="fp32"), pool))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        hooked: list[object] = []
        if way == "hooked":
            optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(8):
            pool.zero_grad()
            reversal_loss(model, sequences(2 * step + dist.get_rank())).backward()
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
        state = optimizer.state_dict()["state"]
        pool.close()
        moments = [state[number][name] for number in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")]
        results.append(([p.detach() for p in model.parameters()], moments, len(hooked)))
    return results


def test_a_step_that_cannot_be_right_is_refused():
    run(1, _refused)


def _refused() -> None:
    model = transformer()
    pool = GradientPool(model)
    pool.attach(build_engine(LazySync(), pool))
    with pytest.raises(ValueError, match=r"LBFGS\.step\(\) requires a closure"):
        pool.step(torch.optim.LBFGS(model.parameters()))
    pool.attach(build_engine(SparseSync(sparsity=0.5), pool))
    with pytest.raises(ValueError, match="sends a part of the gradients"):
        pool.step(torch.optim.SGD(model.parameters()))
