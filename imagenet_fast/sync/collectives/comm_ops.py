"""What a collective is made of: phases, one after another, each on a channel of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.sync.comm_stream import CommStats, CommStream, PendingOp


@dataclass(frozen=True)
class CommOp:
    """A step of a collective: local work, then at most one operation over a channel."""

    channel: CommStream
    start: Callable[[], Work | None]
    gathers: bool
    """Whether it belongs to the second half, which hands out means that others have made: it may be put off."""


@dataclass(frozen=True)
class AllReduceHandle:
    """Phases under way: after ``wait`` their values are the same on every rank.

    On a GPU ``wait`` makes the current stream wait, not the host.
    """

    wait: Callable[[], None]
    traffic: Sequence[CommStats] = ()
    """Of each of its phases."""
    last: Sequence[PendingOp] = ()
    """Its last phase, for others to come after."""


def carry(phases: Sequence[CommOp], after: Sequence[PendingOp] = ()) -> AllReduceHandle:
    """Enter the phases of a message, one after another, the first once all of ``after`` are done."""
    traffic = [CommStats() for _ in phases]
    for phase, cost in zip(phases, traffic, strict=True):
        after = [phase.channel.enter(phase.start, after, cost)]
    return AllReduceHandle(after[0].wait if phases else _nothing, traffic, after if phases else ())


class OpSequence:
    """Phases in the making. Local work is done by the phase that follows it, on its thread or stream."""

    def __init__(self) -> None:
        self.phases: list[CommOp] = []
        self._before: list[Callable[[], object]] = []

    def locally(self, act: Callable[[], object]) -> None:
        """Next, work without the wire."""
        self._before.append(act)

    def over(self, channel: CommStream, act: Callable[[], Work | None], gathers: bool = False) -> None:
        """Next, an operation over ``channel``."""
        before, self._before = self._before, []

        def start() -> Work | None:
            for work in before:
                work()
            return act()

        self.phases.append(CommOp(channel, start, gathers))

    def land(self, channel: CommStream) -> None:
        """Last: what local work is left, over a channel without ranks."""
        if self._before:
            self.over(channel, _nothing, gathers=True)


def lane_of(piece: int, device: torch.device) -> str:
    """The lane of a long message's pieces. gloo carries two operations of a process group at a time, and both may be
    waiting for a rank that is behind, so there pieces take two lanes in turn: 3 % of ``dear``'s step."""
    return "second " if piece % 2 and device.type == "cpu" else ""


def mean_of(arrived: Tensor, ranks: int, divisor: int, own: Tensor) -> None:
    """The sum of ``ranks`` parts over ``divisor``, added in fp32 at least and rounded once, into ``own``."""
    exact = torch.promote_types(arrived.dtype, torch.float32)
    torch.div(arrived.view(ranks, -1).sum(0, dtype=exact), divisor, out=own)


def _nothing() -> None:
    """Nothing to wait for."""
