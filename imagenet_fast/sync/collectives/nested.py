"""All-reduces in levels, for ranks that are near to each other and far from the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.ring import ring, ring_all_gather, ring_reduce_scatter
from imagenet_fast.sync.collectives.rounding import land, landing, room, split
from imagenet_fast.sync.lane import Peers


def hierarchical(tensor: Tensor, wire: torch.dtype, peers: Peers, node: int) -> None:
    """Leave the sum over ``peers`` in ``tensor``: to each node's leader, a ring of leaders, and back.

    A node is ``node`` neighbouring ranks, the last one perhaps fewer. After Jia et al., arXiv 1807.11205.
    """
    leader = peers.rank - peers.rank % node
    if peers.rank != leader:
        message = landing(tensor, wire)
        peers.exchange([(leader, tensor.to(wire))], [])
        peers.exchange([], [(leader, message)])
        land(tensor, message)
        return
    members = range(leader + 1, min(leader + node, peers.size))
    messages = [room(tensor, wire) for _ in members]
    peers.exchange([], zip(members, messages, strict=True))
    for message in messages:
        tensor += message
    ring(tensor, wire, peers.among(range(0, peers.size, node)))
    result = tensor.to(wire)
    peers.exchange([(member, result) for member in members], [])


def torus2d(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum over ``peers`` in ``tensor``: scatter along rows, a ring down columns, gather along rows.

    The ranks form the squarest grid there is; a prime number of them is one ring. A ring's bytes in about
    4 sqrt(P) steps. Mikami et al., arXiv 1811.05233.
    """
    width = next(w for w in range(math.isqrt(peers.size), 0, -1) if peers.size % w == 0)
    row = peers.among(range(peers.rank - peers.rank % width, peers.rank - peers.rank % width + width))
    column = peers.among(range(peers.rank % width, peers.size, width))
    parts = split(tensor, width)
    ring_reduce_scatter(parts, wire, row)
    ring(parts[row.rank], wire, column)
    ring_all_gather(parts, wire, row)
