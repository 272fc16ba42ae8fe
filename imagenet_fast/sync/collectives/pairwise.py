"""Pairwise: each part goes straight to its owner, who adds all of them up, rounds once and sends the result to all.

A ring's bytes in two steps instead of 2 (P-1). The sum is made in fp32 by one rank, so on a 16-bit wire its error
does not grow with the number of ranks, as it does where partial sums are rounded at every hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.rounding import land, landing, room, round_to, split
from imagenet_fast.sync.lane import Peers


def pairwise(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum over ``peers`` in ``tensor``, rounded to the wire dtype."""
    parts = split(tensor, peers.size)
    pairwise_scatter(parts, wire, peers)
    pairwise_gather(parts, wire, peers)


def pairwise_scatter(parts: list[Tensor], wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum of part r on rank r; the other parts keep this rank's values. Adds in the order of ranks, so
    where an element lies makes no difference to its sum."""
    own = parts[peers.rank]
    arrivals = {peer: room(own, wire) for peer in _others(peers)}
    peers.exchange([(peer, parts[peer].to(wire)) for peer in _others(peers)], arrivals.items())
    mine = own.to(wire) if wire != own.dtype else own.clone()  # rounded like the others'
    own.zero_()
    for peer in range(peers.size):
        own += mine if peer == peers.rank else arrivals[peer]


def pairwise_gather(parts: list[Tensor], wire: torch.dtype, peers: Peers) -> None:
    """Spread part r from rank r to all, rounded once to the wire dtype, on rank r too."""
    arrivals = {peer: landing(parts[peer], wire) for peer in _others(peers)}
    message = round_to(parts[peers.rank], wire)
    peers.exchange([(peer, message) for peer in _others(peers)], arrivals.items())
    for peer, arrival in arrivals.items():
        land(parts[peer], arrival)


def _others(peers: Peers) -> list[int]:
    """The other ranks, each rank beginning with its neighbour, so that no rank is everybody's first."""
    return [(peers.rank + step) % peers.size for step in range(1, peers.size)]
