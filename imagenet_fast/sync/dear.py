"""DeAR: reduce-scatter during backward, all-gather during the next forward, together no byte more than an all-reduce.

After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining"
(arXiv 2302.12445). Scatters go before gathers, and gathers go in the order in which the next forward needs them; where
the scatters leave the wire idle, gathers begin before backward has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from imagenet_fast.sync.collectives import wire_for
from imagenet_fast.sync.collectives.pairwise import pairwise_gather, pairwise_scatter
from imagenet_fast.sync.collectives.rounding import divide_after, divide_before, split
from imagenet_fast.sync.deferred import Deferred, Stage
from imagenet_fast.sync.lane import Lane, Peers, Transfer
from imagenet_fast.sync.link import measure_link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


def dear(pool: GradientPool, wire: torch.dtype, bucket: float) -> Deferred:
    """An engine of pairwise all-reduces cut in two, in buckets of ``bucket`` bytes on the wire.

    The last bucket is complete when backward ends and needed when the next forward begins, so it has connections of
    its own.
    """
    device = pool.buffer.device
    urgent, bulk = Lane(device, own=True), Lane(device)
    wire = wire_for(pool.buffer, wire, bulk)

    def stages(values: Tensor, last: Span) -> Iterator[tuple[Tensor, Sequence[Stage]]]:
        lane = urgent if last is pool.spans[-1] else bulk
        for piece in values.split(lane.segment_bytes // wire.itemsize):
            halves = _Halves(piece, wire, lane)
            yield piece, [Stage(0.5, halves.scatter), Stage(0.5, halves.gather)]

    return Deferred(
        pool, wire, bucket, lambda span: None, stages, partial(measure_link, "pairwise", wire, bulk, device)
    )


class _Halves:
    """The two halves of averaging ``piece`` over all ranks."""

    def __init__(self, piece: Tensor, wire: torch.dtype, lane: Lane) -> None:
        self._piece = piece
        self._wire = wire
        self._lane = lane

    def scatter(self) -> Transfer:
        values = self._piece.float()  # itself, where it is fp32
        self._parts = split(values, len(self._lane.ranks))

        def carry(peers: Peers) -> None:
            divide_before(values, self._wire, peers.size)
            pairwise_scatter(self._parts, self._wire, peers)
            divide_after(self._parts[peers.rank], self._wire, peers.size)

        self._scattered = self._lane.start(carry)
        return self._scattered

    def gather(self) -> Transfer:
        def carry(peers: Peers) -> None:
            self._scattered.wait()
            pairwise_gather(self._parts, self._wire, peers)
            if self._piece.dtype != torch.float32:
                self._piece.copy_(torch.cat(self._parts))

        return self._lane.start(carry)
