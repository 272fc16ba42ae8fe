"""What ranks that hold parts of one model send each other besides gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from imagenet_fast.sync.collectives import AllReduceHandle
from imagenet_fast.sync.comm_stream import CommStats
from imagenet_fast.sync.engine import Stopwatch, SyncStats


class ActivationTraffic:
    """Counts activations, and their gradients, as they travel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stats = SyncStats(Stopwatch(device))

    @contextmanager
    def waited_for(self, sent_bytes: int) -> Iterator[None]:
        """So many bytes travel inside, both ways, and computing waits for them."""
        stopwatch = self._stats.exposed
        assert stopwatch is not None
        with stopwatch("activations"):
            yield
        _, begun, ended = stopwatch.blocks[-1]
        self._add(CommStats(sent_bytes, sent_bytes, begun, ended))

    def exchanged(self, sent_bytes: int, received_bytes: int) -> None:
        """So many bytes have travelled; how long ranks waited for them is not known."""
        self._add(CommStats(sent_bytes, received_bytes))

    def spent(self) -> SyncStats:
        """What they have cost since this was asked last."""
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._device))
        return stats

    def _add(self, traffic: CommStats) -> None:
        self._stats.add("activations", AllReduceHandle(_nothing, [traffic]))


def _nothing() -> None:
    """Waited for where it was called."""
