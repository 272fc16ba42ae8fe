"""Communication between ranks that hold parts of one model, other than gradient synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from imagenet_fast.sync.collectives import AllReduceHandle
from imagenet_fast.sync.comm_stream import CommStats
from imagenet_fast.sync.engine import Stopwatch, SyncStats


class ActivationTraffic:
    """A counter of the activations, and of their gradients, that this rank sends and receives."""

    def __init__(self, device: torch.device) -> None:
        """Create an empty counter for traffic of ``device``."""
        self._device = device
        self._stats = SyncStats(Stopwatch(device))

    @contextmanager
    def waited_for(self, sent_bytes: int) -> Iterator[None]:
        """Count a blocking exchange inside the context, and the time it takes.

        Args:
            sent_bytes: Bytes that this rank sends. It receives as many.
        """
        stopwatch = self._stats.exposed
        assert stopwatch is not None
        with stopwatch("activations"):
            yield
        _, begun, ended = stopwatch.blocks[-1]
        self._add(CommStats(sent_bytes, sent_bytes, begun, ended))

    def exchanged(self, sent_bytes: int, received_bytes: int) -> None:
        """Count an exchange whose waiting time is not known."""
        self._add(CommStats(sent_bytes, received_bytes))

    def spent(self) -> SyncStats:
        """Return what has been counted since the last call."""
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._device))
        return stats

    def _add(self, traffic: CommStats) -> None:
        self._stats.add("activations", AllReduceHandle(_nothing, [traffic]))


def _nothing() -> None:
    """Do nothing: the exchange has already been waited for."""
