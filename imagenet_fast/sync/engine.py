"""The seam: what an engine is, and what it reports of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from imagenet_fast.sync.lane import Transfer
from imagenet_fast.sync.span import Span


class Stopwatch:
    """Seconds spent inside ``with`` blocks, in the time of the device that has to wait.

    On a GPU a wait only orders streams, so the host's clock would read zero: two events on the current
    stream are read instead, and only when :meth:`seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun = 0.0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Stopwatch:
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._begun

    def seconds(self) -> float:
        """The total so far. Waits for the GPU to pass the last block."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds


@dataclass
class SyncStats:
    """What one step's synchronisation cost this rank."""

    exposed: Stopwatch | None
    """Time the step stood still for communication; None where it cannot be told."""
    sent_bytes: int = 0
    """Bytes this rank put on the wire: counted message by message, or by arithmetic for a backend's collective."""
    received_bytes: int = 0
    launches: int = 0
    """Collectives started."""

    def add(self, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        self.launches += 1
        for part in transfer.traffic:
            self.sent_bytes += part.sent_bytes
            self.received_bytes += part.received_bytes


class SyncEngine(Protocol):
    """A policy over spans: when to send, what to send and how.

    After :meth:`finish` every span that is not deferred holds the same values on every rank; a deferred one
    does after :meth:`wait`. An exact engine's values are the mean over ranks. Engines derive from this class,
    so one that defers and remembers nothing writes only ``push`` and ``finish``.
    """

    defers: bool = False
    """Whether gradients may still be on their way after ``finish``, until ``wait``."""

    keeps: bool = False
    """Whether gradients that were not sent stay in the pool, and the next step's are added to them."""

    @property
    def sent(self) -> list[slice]:
        """For an engine that keeps: the parts of the pool that the last ``finish`` made equal on all ranks, in order.
        ``zero_grad`` empties them."""
        return []

    def begin(self) -> None:
        """Before the first gradient of a step comes into the pool."""
        return

    def push(self, span: Span) -> None:
        """In backward: this span's local gradient is final. Called in pool order, once a step."""

    def finish(self) -> SyncStats:
        """End of backward: agree on all that may not be deferred, and report the step."""
        ...

    def wait(self, span: Span) -> None:
        """Before this span's parameters are read again: make sure they are up to date."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, such as residuals; empty for most engines."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value, bit for bit."""
        assert not state, f"this engine keeps no state, got {sorted(state)}"
