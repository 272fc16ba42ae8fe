"""Sparse communication loses nothing, starves nothing, and is dense training where everything is sent."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import GradientPool, LazySync, SparseSync, build_engine
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.loops import Layers, loss_of, trained

SGD = Sgd(kind="sgd", lr=0.03, weight_decay=1e-3)
CHUNK = 64


def settings(**changes: object) -> SparseSync:
    return SparseSync(**{"chunk": CHUNK, "dense_epochs": 0, "ramp_epochs": 0, "wire": "fp32", **changes})  # type: ignore[arg-type]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 30), nn.ReLU(), nn.Linear(30, 10))
    return model.to(memory_format=torch.channels_last)


class Given(nn.Module):
    """A parameter whose gradient is what ``forward`` is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def pooled(model: nn.Module, chosen: SparseSync | LazySync) -> tuple[GradientPool, Sparse]:
    pool = GradientPool(model)
    engine = build_engine(chosen, pool)
    pool.attach(engine)
    return pool, engine  # type: ignore[return-value]


def test_nothing_is_lost_and_all_ranks_send_the_same_chunks():
    run(3, _conserves)


def _conserves() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 20 * CHUNK + 37
    model = Given(size)
    pool, engine = pooled(model, settings(sparsity=0.8))
    generator = torch.Generator().manual_seed(rank)
    produced, applied = torch.zeros(size), torch.zeros(size)
    for _ in range(30):
        gradient = world * torch.randint(-8, 9, (size,), generator=generator).float()
        produced += gradient
        pool.zero_grad()
        model(gradient).backward()
        pool.end_backward()
        elements = engine.sent_slices()
        assert elements is not None
        for part in elements[model.weight]:
            assert model.weight.grad is not None
            applied[part] += model.weight.grad[part]
        sent = [None] * world
        dist.all_gather_object(sent, engine.sent)
        assert all(parts == sent[0] for parts in sent)
        assert sum(p.stop - p.start for p in engine.sent) <= math.ceil(0.2 * 21) * CHUNK
    residual = engine.state_dict()["residual"][:size].clone()
    dist.all_reduce(produced)
    dist.all_reduce(residual)
    assert torch.equal(applied * world + residual, produced)


def test_deferred_chunks_equal_awaited_ones_bitwise():
    """With layers that some forwards leave out, whose update is still put off when the next gradients come."""
    run(2, _put_off)


class Sometimes(nn.Module):
    """Leaves out its second layer in every third forward, and its first in every fourth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(192, 20), nn.Linear(20, 20), nn.Linear(20, 10), nn.Linear(192, 20)])
        self.forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        first, second, last, other = self.layers
        x = (first if self.forwards % 4 else other)(images.flatten(1)).relu()
        return last(second(x).relu() if self.forwards % 3 else x)  # type: ignore[no-any-return]


def _put_off() -> None:
    ramped: dict[str, object] = {"sparsity": 0.9, "dense_epochs": 3, "ramp_epochs": 3, "wire": "bf16"}
    for build in (network, Sometimes):
        for changes in ({"sparsity": 0.75}, ramped, {**ramped, "momentum_correction": True}):
            weights = []
            for timing in ("lazy", "hybrid"):
                model, corrected = build(), "momentum_correction" in changes
                pool, _ = pooled(model, settings(timing=timing, **changes))
                _train(model, pool, build_optimizer(SGD, model, corrected), range(20))
                pool.settle()
                weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert torch.equal(*weights), (build, changes)


def test_no_chunk_starves():
    run(2, _waits)


def _waits() -> None:
    chunks = 23
    model = Given(chunks * CHUNK - 1)  # an element more says whether a rank has used it
    pool, engine = pooled(model, settings(sparsity=0.85))
    gradient = torch.ones(chunks, CHUNK)
    gradient[:5] = 1e6  # would win every time
    last_sent = [0] * chunks
    for step in range(1, 60):
        pool.zero_grad()
        model(gradient.flatten()[:-1]).backward()
        pool.end_backward()
        for part in engine.sent:
            for chunk in range(part.start // CHUNK, part.stop // CHUNK):
                last_sent[chunk] = step
        turn = math.ceil(chunks / math.ceil(0.15 * chunks))
        assert all(step - last <= 3 * turn for last in last_sent), last_sent


@pytest.mark.parametrize("collective", ["pairwise", "ring"])
def test_sparsity_zero_is_dense_training_to_the_bit(collective: str):
    run(2, _dense_twice, collective)


def _dense_twice(collective: str) -> None:
    dense, sparse = (
        trained(chosen, network, labelled_loss, optimizer_of=partial(build_optimizer, SGD), steps=10)
        for chosen in (
            LazySync(wire="bf16", collective=collective, threshold_mb=math.inf),
            settings(sparsity=0.0, wire="bf16", collective=collective, threshold_mb=math.inf),
        )
    )
    assert all(torch.equal(dense[key], sparse[key]) for key in dense)


def labelled_loss(model: nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return F.cross_entropy(model(images), images[:, 0].flatten(1)[:, :10].argmax(1))


def _train(model: nn.Module, pool: GradientPool, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        pool.zero_grad()
        loss = labelled_loss(model, step)
        loss.backward()
        pool.step(optimizer)
        losses.append(loss.item())
    return losses


def test_a_state_dict_continues_to_the_bit():
    run(2, _continues)


def _continues() -> None:
    _continues_so(timing="lazy", momentum_correction=True)
    _continues_so(timing="hybrid")


def _continues_so(**changes: object) -> None:
    chosen, corrected = (
        settings(sparsity=0.75, dense_epochs=2, ramp_epochs=2, **changes),
        "momentum_correction" in changes,
    )
    model = network()
    pool, engine = pooled(model, chosen)
    optimizer = build_optimizer(SGD, model, corrected)
    _train(model, pool, optimizer, range(7))
    other = copy.deepcopy(network())
    other.load_state_dict(model.state_dict())
    other_pool, other_engine = pooled(other, chosen)
    other_engine.load_state_dict(engine.state_dict())
    other_optimizer = build_optimizer(SGD, other, corrected)
    for mine, theirs in zip(other_optimizer.params, optimizer.params, strict=True):
        other_optimizer.velocity[mine].copy_(optimizer.velocity[theirs])
    assert _train(model, pool, optimizer, range(7, 12)) == _train(other, other_pool, other_optimizer, range(7, 12))


def test_corrected_momentum_is_that_of_deep_gradient_compression():
    run(2, _corrects)


def _corrects() -> None:
    """Beside its formulas, to the bit: gradients are integers, the momentum is a half. Everything is sent at first."""
    size, world, rank = 12 * CHUNK - 1, 2, dist.get_rank()
    model = Given(size)
    pool, engine = pooled(model, settings(sparsity=0.75, dense_epochs=3, momentum_correction=True, momentum=0.5))
    velocity, residual = torch.zeros(world, size), torch.zeros(world, size)
    for step in range(16):
        generator = torch.Generator().manual_seed(step)
        gradients = world * torch.randint(-8, 9, (world, size), generator=generator).float()
        velocity = 0.5 * velocity + gradients
        residual += velocity
        pool.zero_grad()
        with pool.no_sync():
            model(0.25 * gradients[rank]).backward()
        model(0.75 * gradients[rank]).backward()
        pool.end_backward()
        for part in engine.sent:
            assert model.weight.grad is not None
            part = slice(part.start, min(part.stop, size))
            assert torch.equal(model.weight.grad[part], residual.mean(0)[part]), step
            residual[:, part] = 0.0
            if step >= 3:
                velocity[:, part] = 0.0
        assert torch.equal(engine.state_dict()["velocity"][:size], velocity[rank]), step


def test_where_everything_is_sent_corrected_momentum_is_momentum():
    run(2, _momentum)


def _momentum() -> None:
    """Decay included; the pool learns the order of layers that are registered in another."""
    weights = []
    for chosen in (LazySync(wire="fp32"), settings(sparsity=0.0, momentum_correction=True)):
        model = Layers((3, 0, 4, 1, 2))
        pool, _ = pooled(model, chosen)
        optimizer = build_optimizer(SGD.model_copy(update={"lr": 0.01}), model, chosen.velocity_momentum is not None)
        for step in range(12):
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.step(optimizer)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_it_learns_and_sends_less_once_it_is_sparse():
    for losses, dense_bytes, sparse_bytes in run(2, _learns):
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
        assert sparse_bytes < 0.3 * dense_bytes


def _learns() -> tuple[list[float], int, int]:
    model = network()
    pool, _ = pooled(model, settings(sparsity=0.75, dense_epochs=10, ramp_epochs=5))
    counts = []
    finish = pool.end_backward

    def counting() -> object:
        stats = finish()
        counts.append(stats.sent_bytes)
        return stats

    pool.end_backward = counting  # type: ignore[assignment]
    losses = _train(model, pool, build_optimizer(SGD, model), range(250))
    assert counts[0] > counts[12] > counts[-1], "it ramps"
    return losses, counts[0], counts[-1]


def test_a_second_update_of_a_step_sees_what_the_first_has_updated():
    """A moving average, which is no optimizer."""
    run(2, _second_update)


def _second_update() -> None:
    for timing in ("lazy", "hybrid"):
        model = network()
        pool, _ = pooled(model, settings(sparsity=0.75, dense_epochs=0, ramp_epochs=0, timing=timing))
        optimizer = build_optimizer(SGD, model)
        averaged: list[set[nn.Parameter]] = []
        for step in range(3):
            pool.zero_grad()
            model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            pool.step(optimizer)
            averaged.append(set())
            pool.update(lambda params, elements, seen=averaged[-1]: seen.update(params))
            pool.settle()
        assert averaged == [set(model.parameters())] * 3
        pool.close()


def test_scaler_and_torch_optimizers_are_refused_under_sparse():
    run(1, _refused_optimizers)


def _refused_optimizers() -> None:
    model = network()
    pool, _ = pooled(model, settings(sparsity=0.75))
    pool.zero_grad()
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    with pytest.raises(ValueError, match="optimizers of torch would apply the rest as well"):
        pool.step(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="a GradScaler would apply the rest as well"):
        pool.step(build_optimizer(SGD, model), torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("timing", ["lazy", "hybrid"])
def test_momentum_correction_takes_in_what_a_later_backward_of_the_step_adds(timing: str):
    """A reentrant checkpoint's backward ends inside another one; two losses may reach different layers."""
    corrected = settings(sparsity=0.0, timing=timing, momentum_correction=True, momentum=0.9)
    plain, nested, apart = (_three_layers(corrected, way) for way in ("plain", "nested", "apart"))
    assert plain.keys() == nested.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(nested[name], expected, msg=name)
    assert apart == {}, "checked inside, against two losses at once"


def _three_layers(chosen: SparseSync, way: str) -> dict[str, torch.Tensor]:
    if way == "apart":
        for name, expected in _steps_of(chosen, "at once").items():
            torch.testing.assert_close(_steps_of(chosen, way)[name], expected, msg=name)
        return {}
    return _steps_of(chosen, way)


def _steps_of(chosen: SparseSync, way: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pool, _ = pooled(model, chosen)
    optimizer = build_optimizer(Sgd(kind="sgd", lr=0.02, weight_decay=0.0), model, True)
    for step in range(6):
        pool.zero_grad()
        images = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if way in ("at once", "apart"):
            losses = [model[:2](images).square().sum(), model[2:](images).square().sum()]
            for loss in [losses[0] + losses[1]] if way == "at once" else losses:
                loss.backward()
        else:
            value = images
            for layer in model:
                value = (checkpoint(layer, value, use_reentrant=True) if way == "nested" else layer(value)).tanh()
            value.square().sum().backward()
        pool.step(optimizer)
    pool.settle()
    pool.close()
    return {name: param.detach().clone() for name, param in model.named_parameters()}
