"""After an exception in backward, say for want of memory, training goes on as if the step had not been."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import EngineSettings, SparseSync
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.loops import DENSE, EXACT, HYBRID, LAZY, Layers, alike, backward, pooled, sgd, state, take_step

FEW = (HYBRID, LAZY, DENSE)
REGISTERED = (0, 1, 2, 3, 4)
ODDLY = (3, 0, 4, 1, 2)
"""So that in the first step nothing may have left when backward fails."""


def failing(
    settings: EngineSettings,
    fails: dict[int, int],
    order: tuple[int, ...] = REGISTERED,
    guard: bool = False,
    steps: int = 5,
    left_out: int | None = None,
) -> dict[str, Tensor]:
    """Weights after some steps; ``fails``: in which of them the backward of which layer does, on this rank."""
    model = Layers(order)
    pool, optimizer = pooled(model, settings), sgd(model)
    if guard:
        pool.guard(1e4)
    for step in range(steps):
        if step == left_out:
            continue
        if not backward(model, pool, step, fails.get(step)):
            continue
        pool.end_backward()
        if not pool.found_inf:
            take_step(pool, optimizer, settings)
    pool.close()
    return state(model)


def test_failing_step_leaves_no_trace():
    run(2, _fails_everywhere)


def _fails_everywhere() -> None:
    layer = (3, 1)[dist.get_rank()]
    for settings in EXACT:
        for order, step, guard in ((REGISTERED, 3, False), (ODDLY, 0, True))[: 2 if settings in FEW else 1]:
            expected = failing(settings, {}, order, guard, left_out=step)
            assert alike(failing(settings, {step: layer}, order, guard), expected), (settings, order)


def test_a_step_that_fails_on_one_rank_is_none_on_any():
    """Where gradients are looked at; else it is one that nobody overlooks."""
    run(2, _fails_on_one_rank)


def _fails_on_one_rank() -> None:
    rank = dist.get_rank()
    for settings in FEW:
        expected = failing(settings, {}, ODDLY, guard=True, left_out=0)
        for failed in (0, 1):
            fails = {0: 2} if rank == failed else {}
            assert alike(failing(settings, fails, ODDLY, guard=True), expected), (settings, failed)
        weights = failing(settings, {2: 2} if rank == 1 else {}, steps=4)
        assert all(weights[f"layer{layer}.weight"].isnan().all() for layer in (0, 1, 2)), settings


def test_sparse_trains_on_after_a_backward_that_failed():
    """What it had not to send in that step stays behind, as ever."""
    one, other = run(2, _sparse_at_once_and_put_off)
    for (before, after), (_, theirs) in zip(one, other, strict=True):
        assert after.isfinite().all()
        assert not torch.equal(before, after)
        assert torch.equal(after, theirs), "the ranks agree"
    assert torch.equal(one[0][1], one[1][1])


def _sparse_at_once_and_put_off() -> list[tuple[Tensor, Tensor]]:
    sparse = SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0)
    corrected = {"sparsity": 0.0, "momentum_correction": True, "momentum": 0.5}
    return [_sparse(sparse.model_copy(update=changes)) for changes in ({}, {"timing": "hybrid"}, corrected)]


def _sparse(settings: SparseSync) -> tuple[Tensor, Tensor]:
    model = Layers()
    pool = pooled(model, settings)
    plain = Sgd(kind="sgd", lr=0.01, weight_decay=1e-4)
    optimizer = build_optimizer(plain, model, corrected=settings.velocity_momentum is not None)
    seen = []
    for step in range(10):
        if not backward(model, pool, step, (3, 1)[dist.get_rank()] if step in (2, 4) else None):
            continue
        pool.step(optimizer)
        if step > 7:
            pool.settle()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return seen[-2], seen[-1]


@pytest.mark.parametrize("world", [2, 3])
def test_sparse_lets_nobody_overlook_it_either(world: int):
    """Even if all chunks that this step sends were complete, and on their way, when a backward failed on one rank.

    A chunk of padding alone says nothing, but changes nothing either.
    """
    first, *others = run(world, _sparse_on_one_rank)
    assert sum(weights.isnan().any() for weights in first) > len(first) // 2
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert mine.isnan().any() == theirs.isnan().any(), "all ranks see it"
            assert mine.isnan().any() or torch.equal(mine, theirs), "or none needs to"


def _sparse_on_one_rank() -> list[Tensor]:
    found = []
    for layer, failing_step in [*((layer, 3) for layer in range(5)), *((0, step) for step in range(4, 15))]:
        model = Layers()
        few = SparseSync(wire="fp32", sparsity=0.8, chunk=16, threshold_mb=0, dense_epochs=0, ramp_epochs=0)
        pool = pooled(model, few)
        optimizer = build_optimizer(Sgd(kind="sgd", lr=0.01, weight_decay=1e-4), model)
        for step in range(failing_step + 2):
            if backward(model, pool, step, layer if step == failing_step and dist.get_rank() == 1 else None):
                pool.step(optimizer)
        pool.close()
        found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return found
