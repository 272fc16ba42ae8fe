"""The seam: what an engine is, and what it reports of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from imagenet_fast.sync.lane import Transfer
from imagenet_fast.sync.marks import Mark, mark, seconds_between
from imagenet_fast.sync.prediction import Prediction
from imagenet_fast.sync.span import Span


class Stopwatch:
    """Seconds spent inside ``with stopwatch(label):`` blocks, in the time of the device that has to wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: list[tuple[str, Mark, Mark]] = []
        """What was waited for, from when to when."""

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        begun = mark(self._device)
        try:
            yield
        finally:
            self.blocks.append((label, begun, mark(self._device)))

    def seconds(self) -> float:
        """The total so far. Waits for the GPU to pass the last block."""
        return sum(seconds_between(begin, end) for _, begin, end in self.blocks)


@dataclass
class SyncStats:
    """What one step's synchronisation cost this rank."""

    exposed: Stopwatch | None
    """Time the step stood still for communication; None where it cannot be told."""
    transfers: list[tuple[str, Transfer]] = field(default_factory=list)
    """What was sent, by the layers it was for. A deferring engine counts it in the step that waits for it."""
    decision: tuple[Prediction, ...] = ()
    """In the step after which ``auto`` has chosen: what it chose from."""

    def add(self, label: str, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        self.transfers.append((label, transfer))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank put on the wire: counted message by message, or by arithmetic for a backend's collective."""
        return sum(part.sent_bytes for _, transfer in self.transfers for part in transfer.traffic)

    @property
    def received_bytes(self) -> int:
        return sum(part.received_bytes for _, transfer in self.transfers for part in transfer.traffic)

    @property
    def launches(self) -> int:
        """Collectives started."""
        return len(self.transfers)


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
