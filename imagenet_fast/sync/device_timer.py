"""Moments on the clock of the device that has to wait."""

from __future__ import annotations

import time

import torch

Timestamp = float | torch.cuda.Event
"""A moment, on the clock of the device that has to wait: on a GPU the host runs ahead, and waits only order streams."""


def record_timestamp(device: torch.device) -> Timestamp:
    """Now, as the current stream gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_for(moment: Timestamp) -> None:
    """Have the host wait until the GPU has passed it."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def seconds_between(begin: Timestamp, end: Timestamp) -> float:
    """Negative where ``end`` came first. Waits for the GPU to pass both."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        for moment in (begin, end):  # of two streams, either may be the later one
            wait_for(moment)
        return float(begin.elapsed_time(end)) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - begin
