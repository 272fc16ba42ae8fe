"""A gradient too large for the wire or the precision: all ranks and all layers skip the step, or none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from imagenet_fast.recipe.engine_table import Wire
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.schema import Float16, Full, Precision
from imagenet_fast.sync import DearSync, EngineSettings, HybridSync, LazySync, SparseSync
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.training.optimizers import build_optimizer
from imagenet_fast.training.precision import LossScaler
from tests.ranks import run
from tests.sync.loops import pooled

LARGEST = torch.finfo(torch.float16).max
SHAPES = [(64,), (16, 4), (64,), (4, 16), (64,)]
SGD = Sgd(kind="sgd", lr=0.01, weight_decay=1e-3)


class Layer(nn.Module):
    """Its parameter's gradient is what it is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(shape) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([layer(g) for layer, g in zip(self.layers, gradients, strict=True)]).sum()


def integers(step: int, rank: int) -> list[Tensor]:
    """Gradients whose mean over two ranks 16 bits hold. In some steps one layer of one rank overflows."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    values = [2 * torch.randint(-8, 8, shape, generator=generator).float() for shape in SHAPES]
    if (step, rank) in ((3, 1), (6, 0), (7, 1)):
        values[step % len(SHAPES)].view(-1)[5] = (torch.inf, torch.nan, 1e6)[step % 3]
    return values


STEPS = 14


def synchronous(precision: Precision, wire: Wire) -> Tensor:
    """What two ranks come to that skip a step as a whole, added up in this process."""
    model, scale = Given(), LossScaler(precision, wire, torch.device("cpu"))
    optimizer = build_optimizer(SGD, model)
    assert scale.largest is not None
    for step in range(STEPS):
        everyone = [[g * scale(torch.ones(())) for g in integers(step, rank)] for rank in range(2)]
        fits = all((g.abs() <= scale.largest).all() for grads in everyone for g in grads)
        for param, *parts in zip(model.parameters(), *everyone, strict=True):
            param.grad = torch.stack(parts).mean(0)
        found_inf = torch.tensor(0.0 if fits else 1.0)
        optimizer.found_inf, optimizer.grad_scale = found_inf, scale.end_step(found_inf)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


ENGINES: tuple[EngineSettings, ...] = (
    HybridSync(fuse_mb=0),
    DearSync(bucket_mb=0),
    LazySync(threshold_mb=0),
)
CASES: tuple[tuple[Precision, Wire], ...] = (
    (Full(kind="fp32"), "fp16"),
    (Float16(kind="fp16"), "fp16"),
    (Float16(kind="fp16", loss_scale=512.0), "fp32"),
)


def test_a_step_that_overflows_in_one_layer_of_one_rank_is_skipped_by_all():
    """Put off or at once, to the bit what synchronous SGD does, with a loss scale that changes or does not."""
    expected = [synchronous(*case) for case in CASES]
    for rank in run(2, _overflowing):
        for case, weights_here in zip(CASES, expected, strict=True):
            assert not torch.equal(weights_here, weights(Given()))
            for settings, result in zip(ENGINES, rank.pop(0), strict=True):
                assert torch.equal(result, weights_here), (settings, case)


def _overflowing() -> list[list[Tensor]]:
    return [
        [distributed(settings.model_copy(update={"wire": wire}), precision, wire) for settings in ENGINES]
        for precision, wire in CASES
    ]


def distributed(settings: EngineSettings, precision: Precision, wire: Wire) -> Tensor:
    """As ``training/train_step.py`` does it."""
    model, scale = Given(), LossScaler(precision, wire, torch.device("cpu"))
    pool, optimizer = pooled(model, settings), build_optimizer(SGD, model)
    assert scale.largest is not None
    pool.guard(scale.largest)
    for step in range(STEPS):
        pool.zero_grad()
        scale(model(integers(step, dist.get_rank()))).backward()
        pool.end_backward()
        optimizer.found_inf, optimizer.grad_scale = pool.found_inf, scale.end_step(pool.found_inf)
        pool.step(optimizer)
    pool.close()
    return weights(model)


def test_unsent_overflow_of_sparse_leaves_ranks_alike():
    """It is skipped while it is there, and it is the next to be sent."""
    (outcome, put_off), (outcome_too, _) = run(2, _overflowing_at_once_and_put_off)
    (skipped, steps), (skipped_too, steps_too) = outcome, outcome_too
    assert skipped == skipped_too == put_off[0]
    assert all(torch.equal(here, there) for here, there in zip(steps, put_off[1], strict=True))
    assert sum(skipped) >= 4, "of three overflows one at least waits for a step"
    assert not any(skipped[-4:])
    assert all(torch.equal(here, there) for here, there in zip(steps, steps_too, strict=True))
    assert steps[-1].isfinite().all()
    for before, after in pairwise(steps[-4:]):
        assert not torch.equal(before, after)


def _overflowing_at_once_and_put_off() -> list[tuple[list[bool], list[Tensor]]]:
    sparse = SparseSync(wire="fp16", sparsity=0.75, chunk=32, dense_epochs=0, ramp_epochs=0)
    return [_overflowing_sparsely(sparse), _overflowing_sparsely(sparse.model_copy(update={"timing": "hybrid"}))]


def _overflowing_sparsely(settings: SparseSync) -> tuple[list[bool], list[Tensor]]:
    model = Given()
    pool = pooled(model, settings)
    optimizer = build_optimizer(SGD, model)
    pool.guard(LARGEST)
    skipped, steps = [], []
    for step in range(24):
        pool.zero_grad()
        model(integers(step, dist.get_rank())).backward()
        pool.end_backward()
        assert pool.found_inf is not None
        optimizer.found_inf = pool.found_inf
        pool.step(optimizer)
        skipped.append(bool(pool.found_inf))
        if step % 3 == 0 or step >= 20:
            pool.settle()
            steps.append(weights(model))
    return skipped, steps


class Norms(TorchDispatchMode):
    """Counts norms."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.linalg_vector_norm.default
        return func(*args, **(kwargs or {}))


def test_ddp_with_a_guard_takes_a_step_without_gradients():
    """As where every parameter that is trained is in a branch that was not run."""
    assert run(2, _ddp_without_gradients) == [0.0, 0.0]


def _ddp_without_gradients() -> float:
    peer = DdpPeer(Given(), torch.float32, None)
    peer.guard(LARGEST)
    peer.zero_grad()
    peer.end_backward()
    assert peer.found_inf is not None
    return peer.found_inf.item()


@pytest.mark.parametrize(
    ("settings", "messages"), [(LazySync(threshold_mb=1), 1), (LazySync(threshold_mb=0), len(SHAPES))]
)
def test_gradients_are_looked_at_once_a_message(settings: EngineSettings, messages: int):
    model = Given()
    pool = pooled(model, settings)
    pool.guard(LARGEST)
    for step in range(3):
        pool.zero_grad()
        with Norms() as norms:
            model(integers(step, 0)).backward()
            pool.end_backward()
        assert norms.count == messages
    pool.close()
