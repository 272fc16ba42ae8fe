"""A gradient too large for the wire or the precision: all ranks and all layers skip the step, or none."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.parallel.ddp import DdpPeer
from imagenet_fast.recipe.schema import Float16, Unscaled
from imagenet_fast.sync import EngineSettings, GradientPool, SparseSync
from imagenet_fast.training.optimizers import SGD
from imagenet_fast.training.precision import LossScaler
from tests.conftest import tiers
from tests.ranks import run, with_ranks
from tests.sync.fuzz_loops import ENGINES
from tests.sync.given import SMALL, Given, integers, pooled, weights_of

LARGEST = torch.finfo(torch.float16).max
SCALES = {
    "fp16 on the wire": (Unscaled(kind="fp32"), "fp16"),
    "a loss scale": (Float16(kind="fp16"), "fp16"),
    "a loss scale that stays": (Float16(kind="fp16", loss_scale=512.0), "fp32"),
}
FIRST = [("hybrid", "fp16 on the wire"), ("dear", "a loss scale")]


def started() -> tuple[Given, SGD]:
    model = Given(*([shape] for shape in SMALL))
    for param in model.weights:
        nn.init.ones_(param)
    return model, SGD(model.weights, 0.01, weight_decay=1e-3)


def gradients(step: int, rank: int) -> list[Tensor]:
    """In some steps one layer of one rank overflows."""
    values = integers(SMALL, step, rank, 2)
    if (step, rank) in ((3, 1), (6, 0), (7, 1)):
        values[step % len(SMALL)].view(-1)[5] = (torch.inf, torch.nan, 1e6)[step % 3]
    return values


def guarded(model: nn.Module, settings: EngineSettings, largest: float) -> GradientPool:
    pool = pooled(model, settings)
    pool.guard(largest)
    return pool


def by_hand(scale: LossScaler) -> Tensor:
    """What two ranks come to that skip a step as a whole."""
    model, optimizer = started()
    begun = weights_of(model)
    for step in range(10):
        everyone = [[g * scale(torch.ones(())) for g in gradients(step, rank)] for rank in range(2)]
        fits = all((g.abs() <= scale.largest).all() for grads in everyone for g in grads)
        for param, *parts in zip(model.weights, *everyone, strict=True):
            param.grad = torch.stack(parts).mean(0)
        found_inf = torch.tensor(0.0 if fits else 1.0)
        optimizer.found_inf, optimizer.grad_scale = found_inf, scale.end_step(found_inf)
        optimizer.step()
    assert not torch.equal(weights_of(model), begun)
    return weights_of(model)


@pytest.mark.parametrize(("engine", "how"), tiers(FIRST, product(("hybrid", "dear", "lazy"), SCALES)))
@with_ranks(2)
def test_a_step_that_overflows_in_one_layer_of_one_rank_is_skipped_by_all(engine: str, how: str) -> None:
    """To the bit what synchronous SGD does; as ``training/train_step.py`` does it."""
    precision, wire = SCALES[how]
    scale, (model, optimizer) = LossScaler(precision, wire, torch.device("cpu")), started()
    pool = guarded(model, ENGINES[engine].model_copy(update={"wire": wire}), scale.largest)
    for step in range(10):
        pool.zero_grad()
        scale(model(gradients(step, dist.get_rank()))).backward()
        pool.end_backward()
        optimizer.found_inf, optimizer.grad_scale = pool.found_inf, scale.end_step(pool.found_inf)
        pool.step(optimizer)
    assert torch.equal(weights_of(model), by_hand(LossScaler(precision, wire, torch.device("cpu"))))


def test_an_overflow_that_sparse_has_not_sent_is_skipped_while_it_is_there_by_all_ranks():
    """It is the next to be sent. Put off or at once, the same comes out."""
    (skipped, steps), *others = [result for way in ("lazy", "hybrid") for result in run(2, _sparsely, way)]
    for other_skipped, other_steps in others:
        assert skipped == other_skipped
        assert all(torch.equal(*pair) for pair in zip(steps, other_steps, strict=True))
    assert sum(skipped) >= 4, "of three overflows one at least waits for a step"
    assert not any(skipped[-4:])
    assert steps[-1].isfinite().all()
    for before, after in pairwise(steps[-4:]):
        assert not torch.equal(before, after)


def _sparsely(timing: Any) -> tuple[list[bool], list[Tensor]]:
    (model, optimizer), skipped, steps = started(), [], []
    settings = SparseSync(wire="fp16", sparsity=0.75, chunk=32, ramp_epochs=0, timing=timing)
    pool = guarded(model, settings, LARGEST)
    for step in range(24):
        pool.zero_grad()
        model(gradients(step, dist.get_rank())).backward()
        pool.end_backward()
        optimizer.found_inf = pool.found_inf
        pool.step(optimizer)
        skipped.append(bool(pool.found_inf))
        if step % 3 == 0 or step >= 20:
            pool.settle()
            steps.append(weights_of(model))
    return skipped, steps


@with_ranks(2)
def test_ddp_with_a_guard_takes_a_step_without_gradients() -> None:
    """As where every parameter that is trained is in a branch that was not run."""
    peer = DdpPeer(started()[0], torch.float32, None)
    peer.guard(LARGEST)
    peer.zero_grad()
    peer.end_backward()
    assert peer.found_inf == 0.0
