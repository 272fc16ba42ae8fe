"""Hybrid all-reduce: each layer by the collective that suits it, overlapped with backward and with the next forward.

After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191): convolutional layers are small, bound by
latency and needed first in the next forward; fully connected ones are large, bound by bandwidth and needed last.
The former go through a butterfly, the latter through a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce, wire_for
from imagenet_fast.sync.collectives.butterfly import butterfly_bytes
from imagenet_fast.sync.deferred import Deferred, Stage
from imagenet_fast.sync.lane import Lane
from imagenet_fast.sync.link import measure_link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


def hybrid(pool: GradientPool, wire: torch.dtype, policy: Literal["by-type", "by-size"], fuse: float) -> Deferred:
    """An engine that sends neighbouring layers by a butterfly or by a ring.

    ``by-type`` is the thesis' rule; ``by-size`` fuses layers of all types and takes what is faster for that many
    bytes on this network, which is measured here, by all ranks together. Butterflies have connections of their own
    (on a GPU: a stream and a communicator), so that they need not queue behind rings.
    """
    device = pool.buffer.device
    urgent, bulk = Lane(device, own=True), Lane(device)
    wire = wire_for(pool.buffer, wire, bulk)
    links = {}
    if policy == "by-size":
        links = {name: measure_link(name, wire, bulk, device) for name in _COLLECTIVES}

    def choose(values: Tensor, last: Span) -> Collective:
        if policy == "by-type":
            return by_type(last)
        return min(_COLLECTIVES, key=lambda name: links[name].seconds(values.numel() * wire.itemsize))

    def stages(values: Tensor, last: Span) -> Iterator[tuple[Tensor, Sequence[Stage]]]:
        collective = choose(values, last)
        lane, cost = (urgent, butterfly_bytes(len(bulk.ranks))) if collective == "butterfly" else (bulk, 1.0)
        for piece in values.split(lane.segment_bytes // wire.itemsize):
            yield piece, [Stage(cost, partial(all_reduce, piece, wire, collective, lane))]

    kind = by_type if policy == "by-type" else _alike
    return Deferred(pool, wire, fuse, kind, stages, partial(measure_link, "ring", wire, bulk, device))


def by_type(span: Span) -> Collective:
    """Butterfly for convolutions and norm layers, ring for fully connected layers, whose weight is a matrix."""
    return "ring" if any(p.dim() == 2 for p in span.module.parameters(recurse=False)) else "butterfly"


_COLLECTIVES: tuple[Collective, ...] = ("butterfly", "ring")


def _alike(span: Span) -> None:
    """Of one kind with all others."""
