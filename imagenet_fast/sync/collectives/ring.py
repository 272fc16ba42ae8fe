"""The ring: every rank talks to its neighbours only, and sends 2 (P-1)/P of the values, the least there is.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.rounding import land, landing, room, round_to, split
from imagenet_fast.sync.lane import Peers


def ring(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum over ``peers`` in ``tensor``: P-1 hops to reduce, P-1 to gather. Adds in ``tensor``'s dtype."""
    parts = split(tensor, peers.size)
    ring_reduce_scatter(parts, wire, peers)
    ring_all_gather(parts, wire, peers)


def ring_reduce_scatter(parts: list[Tensor], wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum of part r on rank r; the other parts hold partial sums afterwards.

    A partial sum is rounded to the wire dtype at each hop, and added to in the parts' own dtype.
    """
    before, after = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
    for hop in range(1, peers.size):
        leaving, arriving = parts[peers.rank - hop], parts[peers.rank - hop - 1]
        message = room(arriving, wire)
        peers.exchange([(after, leaving.to(wire))], [(before, message)])
        arriving += message


def ring_all_gather(parts: list[Tensor], wire: torch.dtype, peers: Peers) -> None:
    """Spread part r from rank r to all, rounded once to the wire dtype, on rank r too."""
    before, after = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
    message = round_to(parts[peers.rank], wire)
    for hop in range(1, peers.size):
        part = parts[peers.rank - hop]
        arriving = landing(part, wire)
        peers.exchange([(after, message)], [(before, arriving)])
        land(part, arriving)
        message = arriving
