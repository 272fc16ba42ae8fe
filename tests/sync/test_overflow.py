"""A gradient too large for the wire or the precision: all ranks and all layers skip the step, or none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.parallel.ddp import DdpPeer
from imagenet_fast.sync import SparseSync
from imagenet_fast.training.optimizers import SGD
from tests.ranks import run, with_ranks
from tests.sync.given import SMALL, Given, integers, pooled, weights_of

LARGEST = torch.finfo(torch.float16).max


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
    pool = pooled(model, settings)
    pool.guard(LARGEST)
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
