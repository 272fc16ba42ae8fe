"""The butterfly: ranks exchange with partners at distances 1, 2, 4, ... and are done after log2 P steps.

Short messages are exchanged whole (recursive doubling: lg P steps, lg P times the values on the wire); long ones by
halves and then by doubles (Rabenseifner: 2 lg P steps, a ring's bytes). Thakur et al., "Optimization of collective
communication operations in MPICH", 2005, from where also comes the fold for ranks beyond a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.collectives.rounding import land, landing, room, round_to, split
from imagenet_fast.sync.lane import Peers

SHORT_BYTES = 65536
"""Messages up to here are exchanged whole: fewer steps, more bytes."""


def butterfly(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Leave the sum over ``peers`` in ``tensor``, rounded to the wire dtype; added in ``tensor``'s dtype.

    The order of additions does not depend on an element's place, so on an fp32 wire fusing tensors changes no bit.
    """
    core = 2 ** (peers.size.bit_length() - 1)
    surplus = peers.size - core
    folded = peers.rank < 2 * surplus  # of these, even ranks hand their values to their odd neighbour
    if folded and peers.rank % 2 == 0:
        message = landing(tensor, wire)
        peers.exchange([(peers.rank + 1, tensor.to(wire))], [])
        peers.exchange([], [(peers.rank + 1, message)])
        land(tensor, message)
        return
    if folded:
        message = room(tensor, wire)
        peers.exchange([], [(peers.rank - 1, message)])
        tensor += message
    remaining = peers.among([*range(1, 2 * surplus, 2), *range(2 * surplus, peers.size)])
    if tensor.numel() * wire.itemsize <= SHORT_BYTES:
        _double(tensor, wire, remaining)
    else:
        _halve_and_double(tensor, wire, remaining)
    message = round_to(tensor, wire)
    if folded:
        peers.exchange([(peers.rank - 1, message)], [])


def butterfly_bytes(ranks: int) -> float:
    """What the busiest rank sends of a long message, in units of what it would send in a ring: 1 for a power of two."""
    core = 2 ** (ranks.bit_length() - 1)
    return 1.0 if core == ranks else (1 + 2 * (core - 1) / core) / (2 * (ranks - 1) / ranks)


def _double(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    """Both partners add the same two rounded values, so all ranks hold the same bits at the end."""
    distance = 1
    while distance < peers.size:
        partner = peers.rank ^ distance
        theirs = room(tensor, wire)
        peers.exchange([(partner, round_to(tensor, wire))], [(partner, theirs)])
        tensor += theirs
        distance *= 2


def _halve_and_double(tensor: Tensor, wire: torch.dtype, peers: Peers) -> None:
    kept: list[tuple[int, Tensor, Tensor]] = []  # by step: the partner, the half kept and the half given away
    mine = tensor
    distance = peers.size // 2
    while distance:
        low, high = split(mine, 2)
        keep, give = (high, low) if peers.rank & distance else (low, high)
        theirs = room(keep, wire)
        partner = peers.rank ^ distance
        peers.exchange([(partner, give.to(wire))], [(partner, theirs)])
        keep += theirs
        kept.append((partner, keep, give))
        mine = keep
        distance //= 2
    round_to(mine, wire)
    for partner, keep, give in reversed(kept):
        arriving = landing(give, wire)
        peers.exchange([(partner, keep.to(wire))], [(partner, arriving)])
        land(give, arriving)
