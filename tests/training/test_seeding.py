"""Chance within the model: a function of (seed, step, rank)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from imagenet_fast.distributed.init import DistContext
from imagenet_fast.training.seeding import seed_step

MICRO_STEPS = 3


def world(rank: int = 0) -> DistContext:
    return DistContext(rank, 4, rank, 4, torch.device("cpu"))


def masks(steps: range, seed: int = 1, rank: int = 0) -> list[Tensor]:
    """What a layer keeps of ones in each micro-step of those steps."""
    drop = nn.Dropout(0.5)
    kept = []
    for step in steps:
        seed_step(seed, step, world(rank))
        kept.append(torch.stack([drop(torch.ones(64, 64)) for _ in range(MICRO_STEPS)]))
    return kept


def test_a_run_that_goes_on_at_a_step_draws_the_masks_of_one_that_never_stopped():
    whole = masks(range(6))
    torch.rand(17)  # whatever was drawn before
    for one, other in zip(whole[3:], masks(range(3, 6)), strict=True):
        assert torch.equal(one, other)


def test_steps_micro_steps_ranks_and_seeds_have_masks_of_their_own():
    drawn = [*masks(range(3)), *masks(range(3), rank=1), *masks(range(3), seed=2)]
    kept = (torch.cat(drawn) > 0).double().flatten(1)
    assert len(kept) == 9 * MICRO_STEPS
    torch.testing.assert_close(kept.mean(1), torch.full((len(kept),), 0.5, dtype=torch.float64), rtol=0, atol=0.04)
    correlations = torch.corrcoef(kept) - torch.eye(len(kept))
    assert correlations.abs().max() < 5 / 64
