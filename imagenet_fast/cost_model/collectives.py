"""Compute the bytes that a collective sends, from the number of ranks and nodes alone: closed forms, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from imagenet_fast.recipe.sync_table import Codes, Collective, Wire

BLOCK = 512
"""Values with a common scale, where they are sent as 8-bit codes.

Blocks lie on the pool's grid, so fusing other gradients changes no bit.
"""
LONGEST_PIECE = 2**25
"""Most bytes of one piece of a long message.

With a piece that is much of a model, little is left to overlap: AlexNet's 122 MB in bf16 are four of these. A tree's
latency hardly grows beyond the 512 ranks that have pieces of this size.
"""
ALIGNED_RANKS = 128
"""Most ranks whose parts of a message begin on multiples of 16 bytes on GPUs.

Every parameter is padded for it, to a multiple of 8 x ranks values in bf16: 0.6 % of ResNet-50 at 128 ranks, and 2.4 %
at 512.
"""


@dataclass(frozen=True)
class WireFormat:
    """The form in which values are sent."""

    itemsize: int
    """Bytes of a value."""
    coded: bool = False
    """Whether values are 8-bit codes with a scale per block."""


def wire_format(wire: Wire) -> WireFormat:
    """Return the form of values of a wire dtype."""
    coded = wire in get_args(Codes)
    return WireFormat(1 if coded else 4 if wire == "fp32" else 2, coded)


@dataclass(frozen=True)
class RankLayout:
    """The number of ranks on each node, and whether they work on GPUs."""

    nodes: tuple[int, ...]
    """Number of ranks of each node."""
    on_gpu: bool = True

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.nodes)

    @property
    def row(self) -> int:
        """Ranks of a node if there are several equal nodes of several ranks; else 1."""
        each = self.nodes[0]
        return each if len(set(self.nodes)) == 1 and 1 < each < self.size else 1

    @property
    def column(self) -> int:
        """Ranks that average with each other once nodes have added up their own."""
        return self.size // self.row


def usual_collective(layout: RankLayout, wire: WireFormat) -> Collective:
    """Return the default collective for values sent as ``wire``.

    It is ``hierarchical`` for several equal nodes of several ranks each. Otherwise it is ``pairwise`` for codes, and
    for 16-bit values between nodes, which are then added up in fp32. Inside one node, and for a 32-bit wire, it is
    ``native``, the backend's own.
    """
    if layout.row > 1:
        return "hierarchical"
    return "pairwise" if wire.coded or (len(layout.nodes) > 1 and wire.itemsize < 4) else "native"


def piece_bytes(layout: RankLayout) -> int:
    """Return the bytes of one piece of a long message.

    A long message is sent in pieces, so that one is added up while the next is on the wire. Pieces are long enough for
    every rank's share of one to outweigh a message's latency, but never longer than ``LONGEST_PIECE``. Between CPUs of
    one node there is no wire, and every piece costs time of the cores that train: pieces of 512 KiB made ResNet-18's
    step up to 30 % longer than those of 8 MiB.
    """
    shortest = 2**24 if layout.on_gpu else 2**23 if len(layout.nodes) == 1 else 2**19
    return min(max(shortest, 2**16 * layout.size), LONGEST_PIECE)


def piece_elements(layout: RankLayout, wire: WireFormat) -> int:
    """Return ``piece_bytes`` in values of ``wire``, rounded up so that a piece can be cut evenly."""
    alignment = message_alignment(layout, wire)
    return -(-(piece_bytes(layout) // wire.itemsize) // alignment) * alignment


def message_alignment(layout: RankLayout, wire: WireFormat) -> int:
    """Return the number that a message's length in elements must be a multiple of.

    Then the message can be cut evenly on every level, and between blocks of codes.
    """
    return math.lcm(layout.size, BLOCK * layout.row) if wire.coded else layout.size


def slot_alignment(layout: RankLayout, wire: WireFormat) -> int:
    """Return the number of elements that a gradient's place in the buffer is a multiple of.

    It is ``message_alignment``, and more on up to ``ALIGNED_RANKS`` GPUs, because NCCL copies what does not begin on a
    multiple of 16 bytes value by value.
    """
    aligned = layout.on_gpu and layout.size <= ALIGNED_RANKS
    return math.lcm(message_alignment(layout, wire), layout.size * max(1, 16 // wire.itemsize) if aligned else 1)


def cost_of(collective: Collective, layout: RankLayout, servers: int = 1) -> float:
    """Return how long a long message keeps the wire busy, in units of a ring all-reduce."""
    match collective:
        case "butterfly":
            return butterfly_bytes(layout.column)
        case "parameter_server":
            ranks, servers = layout.size, min(servers, layout.size)  # a server sends its own parts and its answers
            return 1.0 if ranks == 1 else (servers + ranks - 2) / servers * ranks / (2 * (ranks - 1))
        case _:
            return 1.0


def butterfly_bytes(ranks: int) -> float:
    """Return what the busiest rank sends of a long message, in units of a ring: 1 for a power of two."""
    core = 2 ** (ranks.bit_length() - 1)
    return 1.0 if core == ranks else (1 + 2 * (core - 1) / core) / (2 * (ranks - 1) / ranks)


def row_of(collective: Collective, layout: RankLayout) -> int:
    """Return how many ranks a row of a collective's grid has: a node's, or one."""
    return layout.row if collective in ("hierarchical", "ring", "butterfly") else 1


def operations(collective: Collective, layout: RankLayout, wire: WireFormat) -> tuple[int, int]:
    """Return how many operations a host launches for a long message: inside the rows of a grid, and between them.

    A row scatters and gathers. Between rows the backend adds up in one operation; a butterfly exchanges with one rank
    after the other.
    """
    inside = 2 if row_of(collective, layout) > 1 else 0
    if collective == "butterfly":
        return inside, 2 * math.ceil(math.log2(layout.column))
    whole = collective == "hierarchical" and wire.itemsize == 4
    return inside, 1 if whole or collective in ("native", "ring") else 2
