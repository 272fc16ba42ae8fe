"""What a run tells of its steps is read from a GPU when it is long there: nobody waits for a line."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tests
from imagenet_fast.metrics.events import Event, MetricLogger
from imagenet_fast.recipe.schema import Float16
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync import SyncStats
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.nonfinite import NonFiniteLoss
from imagenet_fast.training.precision import LossScaler
from tests.gpu_semantics import pretended_gpu
from tests.gpu_semantics.pretended_gpu import CUDA, PretendedGpu
from tests.ranks import with_ranks

MAY_WAIT = frozenset({"Event.synchronize in wait_for", "Event.synchronize in seconds_between"})
"""Of an earlier interval, which :class:`Aged` sees to."""


class Aged(pretended_gpu.Event):
    """An event that nobody waits for before a later report."""

    report = 0

    def record(self, stream: pretended_gpu.Stream | None = None) -> None:
        self.recorded_before = Aged.report
        super().record(stream)

    def synchronize(self) -> None:
        assert self.recorded_before < Aged.report, "the host drains the queue"
        super().synchronize()


class Told:
    """What is recorded, and after how many reports."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}

    def __call__(self, event: Event) -> None:
        values = {key: value for key, value in event.items() if key not in ("event", "step", "run_s")}
        self.rows.setdefault(event["event"], []).append((Aged.report, event["step"], values))


@with_ranks(2)
def test_a_report_waits_for_nothing_and_every_interval_is_told() -> None:
    """Four intervals of two steps, whose losses are 0.5 on rank 0 and 1.5 on rank 1; then all is told, to all ranks."""
    Aged.report = 0
    told, loss, batches = Told(), 0.5 + dist.get_rank(), iter([(torch.empty(0), torch.empty(0))] * 8)
    record = MetricLogger(lambda: 0.0, [told])
    with PretendedGpu(MAY_WAIT) as gpu, patch.object(torch.cuda, "Event", Aged):
        meter = _meter()
        with gpu.step():
            for step in range(1, 9):
                meter.fetch(batches)
                meter.add_loss(torch.full((), loss, device=CUDA))
                meter.add_step(SyncStats(None))
                if step % 2 == 0:
                    meter.report(record, step, 1, 0.1)
                    Aged.report += 1
        with patch.object(Aged, "synchronize", pretended_gpu.Event.synchronize):
            meter.flush(record)
        assert not gpu.detector.found
    mean = {"epoch": 1, "loss": 1.0, "lr": 0.1}  # of two ranks and two steps
    assert told.rows["train"] == [(1, 2, mean), (2, 4, mean), (3, 6, mean), (4, 8, mean)]
    assert [values for _, _, values in told.rows["precision"]] == [{"loss_scale": 2.0**16, "skipped_steps": 0}] * 4


@with_ranks(2)
def test_losses_that_are_not_finite_end_a_run_one_report_later() -> None:
    with PretendedGpu(MAY_WAIT):
        meter = _meter(most=2)
        for step in range(1, 5):
            loss = float("nan") if dist.get_rank() == 1 else 1.0
            meter.add_loss(torch.full((), loss, device=CUDA))
            meter.add_step(SyncStats(None))
            if step % 2 == 0:
                with pytest.raises(NonFiniteLoss) if step == 4 else nullcontext():
                    meter.report(MetricLogger(lambda: 0.0), step, 1, 0.1)


def _meter(most: int = 5) -> Meter:
    world = tests.world(device=CUDA, bf16=True)
    scale = LossScaler(Float16(kind="fp16", loss_scale=2.0**16), "fp16", CUDA)
    return Meter(world, 2, scale, most, RunResult("failed", "r", "lazy", 2, 2))
