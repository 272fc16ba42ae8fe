"""The time that a run waited for its images, and ranks that are slower than others."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tests
from imagenet_fast.distributed.heartbeat import Heartbeat, publish
from imagenet_fast.distributed.watchdog import watch_board
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.recipe.schema import Unscaled
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync import SyncStats
from imagenet_fast.training.meter import Meter
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
    scale = LossScaler(Unscaled(kind="fp32"), "fp32", world.device)

    def step(seconds: float) -> None:
        end = clock.now + seconds
        for _ in range(2):
            meter.fetch(batches)
        clock.now = end
        meter.add_loss(torch.zeros(()))
        meter.add_step(SyncStats(None))

    def report(step: int) -> None:
        meter.report(MetricLogger(lambda: 0.0), step, 1, 0.1)
        shares.append((outcome.data_wait_pct, outcome.data_wait_of_s))

    with patch("imagenet_fast.training.meter.record_timestamp", lambda device: clock.now):
        meter = Meter(world, 2, scale, 5, outcome)
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


@with_ranks(3, fresh=True)
def test_a_rank_that_takes_much_longer_than_the_others_is_named_once():
    rank, clock, told = dist.get_rank(), Clock(), list[str]()
    publish(watch_board(), rank, Heartbeat(f"node{rank}", 1, "data"))
    world, outcome = tests.world(), RunResult("failed", "r", "lazy", 3, 3)
    with (
        patch("imagenet_fast.training.meter.record_timestamp", lambda device: clock.now),
        patch("imagenet_fast.distributed.watchdog.warn", told.append),
    ):
        scale = LossScaler(Unscaled(kind="fp32"), "fp32", world.device)
        meter = Meter(world, 3, scale, 5, outcome)
        for step in range(1, 9):
            clock.now += (1.0, 1.1, 3.5)[rank]
            meter.add_loss(torch.zeros(()))
            meter.add_step(SyncStats(None))
            if step % 2 == 0:
                meter.report(MetricLogger(lambda: 0.0), step, 1, 0.1)
    sentence = "rank 2 on node2 takes 3.5 s for its own part of a step, where the median of all ranks is 1.1 s"
    assert told == ([sentence] if rank == 0 else [])
