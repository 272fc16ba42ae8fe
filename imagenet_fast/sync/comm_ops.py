"""The parts of a collective: phases, run one after another, each on its own stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.sync.comm_stream import CommStats, CommStream, Wait


@dataclass(frozen=True)
class CommOp:
    """A phase of a collective: local work, then at most one operation over a stream."""

    stream: CommStream
    start: Callable[[], Work | None]
    second_half: bool
    """True if the phase belongs to the second half, which distributes finished means and may be delayed."""


@dataclass(frozen=True)
class AllReduceHandle:
    """The phases of a message in flight.

    After ``wait`` the values are the same on every rank. On a GPU ``wait`` makes the current stream wait, not the host.
    """

    traffic: Sequence[CommStats] = ()
    """Statistics of each phase."""
    last: Sequence[Wait] = ()
    """A function that waits for the last phase; empty if there is no phase."""

    def wait(self) -> None:
        """Wait for the last phase."""
        for wait in self.last:
            wait()


def carry(phases: Sequence[CommOp], after: Sequence[Wait] = ()) -> AllReduceHandle:
    """Launch the phases of a message, one after another, the first once all of ``after`` are done."""
    traffic = [CommStats() for _ in phases]
    for phase, cost in zip(phases, traffic, strict=True):
        after = [phase.stream.enter(phase.start, after, cost)]
    return AllReduceHandle(traffic, after if phases else ())


class OpSequence:
    """Phases being built; local work is done by the phase that follows it, on that phase's thread or stream."""

    def __init__(self) -> None:
        """Create an empty list of phases."""
        self.phases: list[CommOp] = []
        self._before: list[Callable[[], object]] = []

    def add_local(self, act: Callable[[], object]) -> None:
        """Add local work."""
        self._before.append(act)

    def add_collective(self, stream: CommStream, act: Callable[[], Work | None], second_half: bool = False) -> None:
        """Add a phase over ``stream`` that does the local work added before, then ``act``."""
        before, self._before = self._before, []

        def start() -> Work | None:
            for work in before:
                work()
            return act()

        self.phases.append(CommOp(stream, start, second_half))

    def close(self, stream: CommStream) -> None:
        """Add the remaining local work, if any, as a last phase over ``stream``, which has no ranks."""
        if self._before:
            self.add_collective(stream, lambda: None, second_half=True)


def mean_of(arrived: Tensor, ranks: int, divisor: int, own: Tensor) -> None:
    """Write the sum of ``ranks`` parts over ``divisor`` into ``own``, added in at least fp32 and rounded once."""
    exact = torch.promote_types(arrived.dtype, torch.float32)
    torch.div(arrived.view(ranks, -1).sum(0, dtype=exact), divisor, out=own)
