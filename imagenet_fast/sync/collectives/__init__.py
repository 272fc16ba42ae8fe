"""All-reduce as a free function over a flat tensor: it starts at once and returns something to wait for."""

from __future__ import annotations

from functools import partial
from typing import assert_never

import torch
from torch import Tensor

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives.butterfly import butterfly
from imagenet_fast.sync.collectives.native import native, ring_bytes
from imagenet_fast.sync.collectives.nested import hierarchical, torus2d
from imagenet_fast.sync.collectives.pairwise import pairwise
from imagenet_fast.sync.collectives.ring import ring
from imagenet_fast.sync.collectives.rounding import divide_after, divide_before
from imagenet_fast.sync.collectives.server import parameter_server
from imagenet_fast.sync.lane import Lane, Peers, Transfer, together

__all__ = ["all_reduce", "ring_bytes", "usual_collective", "wire_for"]


def all_reduce(tensor: Tensor, wire: torch.dtype, collective: Collective, lane: Lane) -> Transfer:
    """Start averaging a 1-D tensor over all ranks, in place, its values travelling as ``wire``, or as they are
    where that is no wider.

    Every rank must make the same calls of one lane in the same order. Any number of ranks and any length will do,
    none included. With one rank nothing is sent and nothing is rounded. All ranks end with the same bits. Additions
    are made in fp32, except by ``native``, which adds in the wire's dtype.
    """
    if len(lane.ranks) == 1 or not tensor.numel():
        return together([])
    wire = wire_for(tensor, wire, lane)
    if collective == "native":
        return native(tensor, wire, lane)
    pieces = tensor.split(lane.segment_bytes // wire.itemsize)
    return together([lane.start(partial(_average, piece, wire, collective, lane.node)) for piece in pieces])


def wire_for(tensor: Tensor, wire: torch.dtype, lane: Lane) -> torch.dtype:
    """What the values of ``tensor`` travel as: never wider than they are, and unrounded where they go nowhere."""
    return wire if wire.itemsize < tensor.element_size() and len(lane.ranks) > 1 else tensor.dtype


def usual_collective(tensor: Tensor, wire: torch.dtype, lane: Lane) -> Collective:
    """What to take where nobody has chosen: pairwise for 16 bits, since it rounds once, wherever it is as fast.

    That is so between up to 16 CPU ranks on several machines (`bench sync`, docs/benchmarks.md). With more of them its
    messages become short; on one machine its threads cost more than the wire does; on GPUs it has not been measured.
    """
    ranks = len(lane.ranks)
    short = wire.itemsize < tensor.element_size()
    return "pairwise" if short and not tensor.is_cuda and lane.node < ranks <= 16 else "native"


def _average(tensor: Tensor, wire: torch.dtype, collective: Collective, node: int, peers: Peers) -> None:
    values = tensor.float()  # itself, where it is fp32
    divide_before(values, wire, peers.size)
    match collective:
        case "pairwise":
            pairwise(values, wire, peers)
        case "ring":
            ring(values, wire, peers)
        case "butterfly":
            butterfly(values, wire, peers)
        case "hierarchical":
            hierarchical(values, wire, peers, node)
        case "torus2d":
            torus2d(values, wire, peers)
        case "parameter_server":
            parameter_server(values, wire, peers)
        case "native":
            raise AssertionError("a backend takes its tensors whole")
        case _:
            assert_never(collective)
    divide_after(values, wire, peers.size)
    if values is not tensor:
        tensor.copy_(values)
