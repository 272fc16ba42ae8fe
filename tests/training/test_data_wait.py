"""The time that a run waited for its images."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tests
from imagenet_fast.metrics import MetricLogger, RunResult
from imagenet_fast.recipe.schema import Full
from imagenet_fast.sync import SyncStats
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.nonfinite import NonFiniteCounter
from imagenet_fast.training.precision import LossScaler
from tests.ranks import with_ranks


class Clock:
    """Seconds, as a device would tell them; it tells what was agreed with it."""

    now = 0.0

    def batches(self, waits: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
        for wait in waits:
            self.now += wait
            yield torch.empty(0), torch.empty(0)


@with_ranks(2)
def test_slowest_rank_counts_without_first_step_and_evaluations():
    """Three steps of two batches, and an evaluation before the last; the batches of rank 1 are always there. Shares,
    and seconds that they are of, after the second step and the third."""
    rank, clock, outcome, shares = dist.get_rank(), Clock(), RunResult("failed", "r", "lazy", 2, 2), []
    world = tests.world(rank, 2)
    batches = clock.batches([[7.0, 1.0, 0.5, 0.5, 0.3, 0.3], [0.0] * 6][rank])
    scale = LossScaler(Full(kind="fp32"), "fp32", world.device)

    def step(seconds: float) -> None:
        end = clock.now + seconds
        for _ in range(2):
            meter.fetch(batches)
        clock.now = end
        meter.add_step(SyncStats(None), torch.zeros(()))

    def report(step: int) -> None:
        meter.report(MetricLogger(lambda: 0.0), step, 1, 0.1)
        shares.append((outcome.data_wait_pct, outcome.data_wait_of_s))

    with patch("imagenet_fast.training.meter.record_timestamp", lambda device: clock.now):
        meter = Meter(world, 2, scale, NonFiniteCounter(world.device), 5, outcome)
        step(10.0)
        step(2.0)
        report(2)
        clock.now += 100.0
        meter.restart()
        step(2.0)
        report(3)
    assert shares == [pytest.approx((50.0, 2.0)), pytest.approx((40.0, 4.0))]
    outcome = RunResult("failed", "r", "lazy", 1, 1)
    outcome.add_wait(0.0, 0.0)
    assert outcome.data_wait_pct is None, "of a run of one step"
