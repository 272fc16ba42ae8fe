"""The butterfly: ranks exchange with partners at distances 1, 2, 4, ... and are done after log2 P steps.

Short messages are exchanged whole (recursive doubling: lg P steps, lg P times the values on the wire); long ones by
halves and then by doubles (Rabenseifner: 2 lg P steps, a ring's bytes). The nearest partner comes first, so that the
longest messages have the shortest way. Thakur et al., "Optimization of collective communication operations in MPICH",
2005, from where also comes the fold for ranks beyond a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.comm_stream import CommStream

SHORT_BYTES = 65536
"""Messages up to here are exchanged whole: fewer steps, more bytes."""


def butterfly(values: Tensor, wire: torch.dtype, channel: CommStream) -> None:
    """Leave the sum over ``channel`` in ``values``, rounded to the wire dtype; added in the dtype of ``values``.

    The order of additions does not depend on an element's place, so on an fp32 wire fusing tensors changes no bit.
    """
    core = core_of(channel.size)
    folded = channel.place < 2 * (channel.size - len(core))  # of these, even ranks hand theirs to their odd neighbour
    if folded and channel.place % 2 == 0:
        message = _landing(values, wire)
        channel.exchange([(channel.place + 1, values.to(wire))], [])
        channel.exchange([], [(channel.place + 1, message)])
        _land(values, message)
        return
    if folded:
        message = _room(values, wire)
        channel.exchange([], [(channel.place - 1, message)])
        values += message
    if values.numel() * wire.itemsize <= SHORT_BYTES:
        _double(values, wire, channel, core)
    else:
        _halve_and_double(values, wire, channel, core)
    message = _round_to(values, wire)
    if folded:
        channel.exchange([(channel.place - 1, message)], [])


def core_of(ranks: int) -> list[int]:
    """The places of a power of two of ranks that are left once the surplus is folded into neighbours."""
    surplus = ranks - 2 ** (ranks.bit_length() - 1)
    return [*range(1, 2 * surplus, 2), *range(2 * surplus, ranks)]


def butterfly_bytes(ranks: int) -> float:
    """What the busiest rank sends of a long message, in units of what it would send in a ring: 1 for a power of two."""
    core = len(core_of(ranks))
    return 1.0 if core == ranks else (1 + 2 * (core - 1) / core) / (2 * (ranks - 1) / ranks)


def _double(values: Tensor, wire: torch.dtype, channel: CommStream, members: list[int]) -> None:
    """Both partners add the same two rounded values, so all ranks hold the same bits at the end."""
    place = members.index(channel.place)
    distance = 1
    while distance < len(members):
        partner = members[place ^ distance]
        theirs = _room(values, wire)
        channel.exchange([(partner, _round_to(values, wire))], [(partner, theirs)])
        values += theirs
        distance *= 2


def _halve_and_double(values: Tensor, wire: torch.dtype, channel: CommStream, members: list[int]) -> None:
    place = members.index(channel.place)
    kept: list[tuple[int, Tensor, Tensor]] = []  # by step: the partner, the half kept and the half given away
    mine = values
    distance = 1
    while distance < len(members):
        low, high = mine.tensor_split(2)
        keep, give = (high, low) if place & distance else (low, high)
        theirs = _room(keep, wire)
        partner = members[place ^ distance]
        channel.exchange([(partner, give.to(wire))], [(partner, theirs)])
        keep += theirs
        kept.append((partner, keep, give))
        mine = keep
        distance *= 2
    _round_to(mine, wire)
    for partner, keep, give in reversed(kept):
        arriving = _landing(give, wire)
        channel.exchange([(partner, keep.to(wire))], [(partner, arriving)])
        _land(give, arriving)


def _room(values: Tensor, wire: torch.dtype) -> Tensor:
    """Space for as many values, as they arrive."""
    return torch.empty_like(values, dtype=wire)


def _round_to(values: Tensor, wire: torch.dtype) -> Tensor:
    """The values as they travel; ``values`` keeps what the others will receive."""
    if wire == values.dtype:
        return values
    message = values.to(wire)
    values.copy_(message)
    return message


def _landing(values: Tensor, wire: torch.dtype) -> Tensor:
    """Where values may arrive: in place unless they need a cast; :func:`_land` ends it."""
    return values if wire == values.dtype else _room(values, wire)


def _land(values: Tensor, message: Tensor) -> None:
    if message is not values:
        values.copy_(message)
