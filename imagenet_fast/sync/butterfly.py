"""The butterfly all-reduce: ranks exchange with partners at distances 1, 2, 4, ..., in log2 P steps.

Short messages are exchanged whole (recursive doubling: log2 P steps, log2 P times the values on the wire). Long
messages are exchanged by halves and then by doubles (Rabenseifner: 2 log2 P steps, as many bytes as a ring). The
nearest partner is first, so the longest messages have the shortest way. Source: Thakur et al., "Optimization of
collective communication operations in MPICH", 2005, also for the fold of ranks beyond a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from imagenet_fast.sync.comm_stream import CommStream

SHORT_BYTES = 65536
"""Bytes on the wire up to which a message is exchanged whole: fewer steps, more bytes."""


def butterfly(values: Tensor, wire: torch.dtype, stream: CommStream) -> None:
    """Replace ``values`` by their sum over ``stream``, added in their dtype and rounded to the wire dtype.

    The order of additions does not depend on an element's place, so on an fp32 wire fusing tensors changes no bit.
    """
    surplus = stream.size - 2 ** (stream.size.bit_length() - 1)
    core = [*range(1, 2 * surplus, 2), *range(2 * surplus, stream.size)]  # a power of two
    folded = stream.place < 2 * surplus  # of these, even places send to their odd neighbour
    if folded and stream.place % 2 == 0:
        stream.exchange([(stream.place + 1, values.to(wire))], [])
        _receive(values, wire, stream, stream.place + 1)
        return
    if folded:
        message = torch.empty_like(values, dtype=wire)
        stream.exchange([], [(stream.place - 1, message)])
        values += message
    if values.numel() * wire.itemsize <= SHORT_BYTES:
        _double(values, wire, stream, core)
    else:
        _halve_and_double(values, wire, stream, core)
    message = _round_to(values, wire)
    if folded:
        stream.exchange([(stream.place - 1, message)], [])


def _double(values: Tensor, wire: torch.dtype, stream: CommStream, members: list[int]) -> None:
    """Exchange whole messages: partners add the same two rounded values, so all ranks end with the same bits."""
    place = members.index(stream.place)
    distance = 1
    while distance < len(members):
        partner = members[place ^ distance]
        theirs = torch.empty_like(values, dtype=wire)
        stream.exchange([(partner, _round_to(values, wire))], [(partner, theirs)])
        values += theirs
        distance *= 2


def _halve_and_double(values: Tensor, wire: torch.dtype, stream: CommStream, members: list[int]) -> None:
    place = members.index(stream.place)
    kept: list[tuple[int, Tensor, Tensor]] = []  # per step: partner, half kept, half sent
    mine = values
    distance = 1
    while distance < len(members):
        low, high = mine.tensor_split(2)
        keep, give = (high, low) if place & distance else (low, high)
        theirs = torch.empty_like(keep, dtype=wire)
        partner = members[place ^ distance]
        stream.exchange([(partner, give.to(wire))], [(partner, theirs)])
        keep += theirs
        kept.append((partner, keep, give))
        mine = keep
        distance *= 2
    _round_to(mine, wire)
    for partner, keep, give in reversed(kept):
        _receive(give, wire, stream, partner, [(partner, keep.to(wire))])


def _round_to(values: Tensor, wire: torch.dtype) -> Tensor:
    """Return ``values`` in the wire dtype, and round ``values`` to what the other ranks receive."""
    if wire == values.dtype:
        return values
    message = values.to(wire)
    values.copy_(message)
    return message


def _receive(
    values: Tensor, wire: torch.dtype, stream: CommStream, peer: int, leaving: Sequence[tuple[int, Tensor]] = ()
) -> None:
    """Receive ``values`` from ``peer``, in place or by a tensor of the wire dtype, while ``leaving`` is sent."""
    message = values if wire == values.dtype else torch.empty_like(values, dtype=wire)
    stream.exchange(leaving, [(peer, message)])
    if message is not values:
        values.copy_(message)
