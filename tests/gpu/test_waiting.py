"""A GPU's own time without images. Run with `pytest tests/gpu` where there is a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

import tests
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.recipe.schema import Unscaled
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync import SyncStats
from imagenet_fast.training.meter import Meter
from imagenet_fast.training.precision import LossScaler
from tests.ranks import run

WORK = 10**8
"""Cycles of a GPU: some 50 ms."""


def test_waiting_counts_gpu_decoders_only():
    ((decoding, reading),) = run(1, _shares, backend="nccl")
    assert 30 < decoding < 60, "of two pieces of work as long one is decoding, of which the host sees nothing"
    assert reading < 10, "the host looks for images while the GPU is at work"


def _shares() -> tuple[float | None, ...]:
    device = torch.device("cuda", torch.cuda.current_device())
    return _share(_decoded_late(device), device), _share(_read_slowly(device), device)


def _share(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> float | None:
    outcome = RunResult("failed", "r", "lazy", 1, 1)
    scale = LossScaler(Unscaled(kind="fp32"), "fp32", device)
    meter = Meter(tests.world(0, 1, device=device), 1, scale, 5, outcome)
    for _ in range(6):
        meter.fetch(batches)
        torch.cuda._sleep(WORK)
        meter.add_loss(torch.zeros((), device=device))
        meter.add_step(SyncStats(None))
    meter.report(MetricLogger(lambda: 0.0), 6, 1, 0.1)
    meter.flush(MetricLogger(lambda: 0.0))
    return outcome.data_wait_pct


def _decoded_late(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """By another stream, which the training's waits for; it begins when it is asked, once the step before is over."""
    decoder = torch.cuda.Stream(device)
    while True:
        decoder.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(decoder):
            torch.cuda._sleep(WORK)
        torch.cuda.current_stream(device).wait_stream(decoder)
        yield torch.empty(0, device=device), torch.empty(0, device=device)


def _read_slowly(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        time.sleep(0.01)
        yield torch.empty(0, device=device), torch.empty(0, device=device)
