"""Timestamps, and a stopwatch, on the clock of the device that waits for communication."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from imagenet_fast.distributed.heartbeat import here

Timestamp = float | torch.cuda.Event
"""A moment on the device's own clock: seconds for a CPU, an event for a GPU.

On a GPU the host runs ahead and waits only order streams, so the host's clock would not show them.
"""


def record_timestamp(device: torch.device) -> Timestamp:
    """Record the present moment; on a GPU, the moment at which its current stream reaches this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Timestamp, end: Timestamp) -> float:
    """Return the seconds from ``begin`` to ``end``, negative where ``end`` was first. Wait for the GPU to pass both."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        for moment in (begin, end):  # they may be of two streams, and either may be the later one
            moment.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - begin


class Stopwatch:
    """A stopwatch for ``with stopwatch(label):`` blocks, on the clock of the device that waits."""

    def __init__(self, device: torch.device, blocks: Iterable[tuple[str, Timestamp, Timestamp]] = ()) -> None:
        """Create a stopwatch that has timed these blocks."""
        self._device = device
        self.blocks = list(blocks)
        """The label, begin and end of each block."""

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Time the block that runs inside the context."""
        begun = record_timestamp(self._device)
        try:
            with here.waiting() if self._device.type == "cpu" else nullcontext():  # with a GPU the host does not wait
                yield
        finally:
            self.blocks.append((label, begun, record_timestamp(self._device)))

    def seconds(self) -> float:
        """Return the total so far. Wait for the GPU to pass the last block."""
        return sum(seconds_between(begin, end) for _, begin, end in self.blocks)
