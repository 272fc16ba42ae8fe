"""A gradient too large for the wire or the precision: all ranks and all layers skip the step, or none."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from imagenet_fast.recipe.engine_table import Wire
from imagenet_fast.recipe.schema import Float16, Full, Precision
from imagenet_fast.sync import DearSync, EngineSettings, GradientPool, HybridSync, LazySync, SparseSync, build_engine
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.training.optimizers import SGD
from imagenet_fast.training.precision import LossScaler
from tests.ranks import lending, run

LARGEST = torch.finfo(torch.float16).max
SHAPES = [(64,), (16, 4), (64,), (4, 16), (64,)]
STEPS = 14


class Given(nn.Module):
    """Parameters whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.weights, gradients, strict=True)]).sum()


def integers(step: int, rank: int) -> list[Tensor]:
    """Gradients whose mean over two ranks 16 bits hold. In some steps one layer of one rank overflows."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    values = [2 * torch.randint(-8, 8, shape, generator=generator).float() for shape in SHAPES]
    if (step, rank) in ((3, 1), (6, 0), (7, 1)):
        values[step % len(SHAPES)].view(-1)[5] = (torch.inf, torch.nan, 1e6)[step % 3]
    return values


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), 0.01, weight_decay=1e-3)


def guarded(model: nn.Module, settings: EngineSettings, largest: float = LARGEST) -> GradientPool:
    pool = GradientPool(model, topology=lending() if dist.is_initialized() else None)
    pool.guard(largest)
    pool.attach(build_engine(settings, pool))
    return pool


@cache
def by_hand(precision: Precision, wire: Wire) -> Tensor:
    """What two ranks come to that skip a step as a whole, added up in this process."""
    model, scale = Given(), LossScaler(precision, wire, torch.device("cpu"))
    optimizer = sgd(model)
    assert scale.largest is not None
    for step in range(STEPS):
        everyone = [[g * scale(torch.ones(())) for g in integers(step, rank)] for rank in range(2)]
        fits = all((g.abs() <= scale.largest).all() for grads in everyone for g in grads)
        for param, *parts in zip(model.parameters(), *everyone, strict=True):
            param.grad = torch.stack(parts).mean(0)
        found_inf = torch.tensor(0.0 if fits else 1.0)
        optimizer.found_inf, optimizer.grad_scale = found_inf, scale.end_step(found_inf)
        optimizer.step()
    assert not torch.equal(weights(model), weights(Given()))
    return weights(model)


@pytest.mark.parametrize(
    ("precision", "wire"),
    [(Full(kind="fp32"), "fp16"), (Float16(kind="fp16"), "fp16"), (Float16(kind="fp16", loss_scale=512.0), "fp32")],
    ids=["fp16 on the wire", "a loss scale", "a loss scale that stays"],
)
@pytest.mark.parametrize(
    "settings", [HybridSync(fuse_mb=0), DearSync(bucket_mb=0), LazySync(threshold_mb=0)], ids=["hybrid", "dear", "lazy"]
)
def test_a_step_that_overflows_in_one_layer_of_one_rank_is_skipped_by_all(
    settings: EngineSettings, precision: Precision, wire: Wire
):
    """To the bit what synchronous SGD does."""
    for found in run(2, _overflowing, settings.model_copy(update={"wire": wire}), precision, wire):
        assert torch.equal(found, by_hand(precision, wire))


def _overflowing(settings: EngineSettings, precision: Precision, wire: Wire) -> Tensor:
    """As ``training/train_step.py`` does it."""
    model, scale = Given(), LossScaler(precision, wire, torch.device("cpu"))
    assert scale.largest is not None
    pool, optimizer = guarded(model, settings, scale.largest), sgd(model)
    for step in range(STEPS):
        pool.zero_grad()
        scale(model(integers(step, dist.get_rank()))).backward()
        pool.end_backward()
        optimizer.found_inf, optimizer.grad_scale = pool.found_inf, scale.end_step(pool.found_inf)
        pool.step(optimizer)
    pool.close()
    return weights(model)


def test_an_overflow_that_sparse_has_not_sent_is_skipped_while_it_is_there_by_all_ranks():
    """It is the next to be sent. Put off or at once, the same comes out."""
    here, there = run(2, _overflowing_sparsely, "lazy")
    (skipped, steps), (put_off, _) = here, run(2, _overflowing_sparsely, "hybrid")
    for other_skipped, other_steps in (there, put_off):
        assert skipped == other_skipped
        assert all(torch.equal(*pair) for pair in zip(steps, other_steps, strict=True))
    assert sum(skipped) >= 4, "of three overflows one at least waits for a step"
    assert not any(skipped[-4:])
    assert steps[-1].isfinite().all()
    for before, after in pairwise(steps[-4:]):
        assert not torch.equal(before, after)


def _overflowing_sparsely(timing: Any) -> tuple[list[bool], list[Tensor]]:
    model = Given()
    pool = guarded(model, SparseSync(wire="fp16", sparsity=0.75, chunk=32, ramp_epochs=0, timing=timing))
    optimizer = sgd(model)
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
    pool.close()
    return skipped, steps


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


class Norms(TorchDispatchMode):
    """Counts norms."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.linalg_vector_norm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("threshold_mb", "messages"), [(1, 1), (0, len(SHAPES))])
def test_gradients_are_looked_at_once_a_message(threshold_mb: float, messages: int):
    model = Given()
    pool = guarded(model, LazySync(threshold_mb=threshold_mb))
    for step in range(3):
        pool.zero_grad()
        with Norms() as norms:
            model(integers(step, 0)).backward()
            pool.end_backward()
        assert norms.count == messages
    pool.close()
