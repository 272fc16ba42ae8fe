"""Compute the bytes that a collective sends, from the number of ranks and nodes alone: closed forms, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never, get_args

from imagenet_fast.recipe.engine_table import Codes, Collective, Wire

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

    @property
    def square_row(self) -> int:
        """Ranks in a row of the squarest grid."""
        size = self.size
        return next(width for width in range(math.isqrt(size), 0, -1) if size % width == 0)


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
    return math.lcm(layout.size, BLOCK * math.lcm(layout.row, layout.square_row)) if wire.coded else layout.size


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
            return server_bytes(layout.size, servers)
        case _:
            return 1.0


def butterfly_bytes(ranks: int) -> float:
    """Return what the busiest rank sends of a long message, in units of a ring: 1 for a power of two."""
    core = 2 ** (ranks.bit_length() - 1)
    return 1.0 if core == ranks else (1 + 2 * (core - 1) / core) / (2 * (ranks - 1) / ranks)


def server_bytes(ranks: int, servers: int) -> float:
    """Return what a server sends, its own parts and its answers, in units of what each rank sends in a ring."""
    servers = min(servers, ranks)
    if ranks == 1:
        return 1.0
    return ((servers - 1) + (ranks - 1)) / servers * ranks / (2 * (ranks - 1))


def nic_share(collective: Collective, layout: RankLayout, servers: int = 1) -> float:
    """Return the bytes that the busiest node sends to other nodes, per byte of a long message.

    All ranks of a node share its NICs. Nodes have equally many ranks.
    """
    nodes, each, ranks = len(layout.nodes), layout.nodes[0], layout.size
    if nodes == 1:
        return 0.0
    match collective:
        case "hierarchical":
            return 2 * (nodes - 1) / nodes
        case "ring":
            return 2 * (layout.column - 1) / layout.column  # with one rank a node, a ring of nodes
        case "native":
            return 2 * (ranks - 1) / ranks  # one rank of each node sends to the next node
        case "butterfly":
            return 2 * (layout.column - 1) / layout.column * butterfly_bytes(layout.column)
        case "pairwise":  # each rank scatters to all others; the gather is the backend's ring
            return each * (ranks - each) / ranks + (ranks - 1) / ranks
        case "torus2d":
            return _torus_share(each, ranks, layout.square_row)
        case "parameter_server":
            return _server_share(each, ranks, min(servers, ranks))
        case _:
            assert_never(collective)


def _torus_share(each: int, ranks: int, width: int) -> float:
    """Return ``nic_share`` of a torus: rows of ``width`` neighbours scatter and gather, columns average a part."""
    height = ranks // width

    def across(node: int) -> float:
        """Return what a node sends to others."""
        here, sent = range(node * each, (node + 1) * each), 0.0
        for rank in here:
            row = range(rank - rank % width, rank - rank % width + width)
            sent += sum(1 for other in row if other not in here) / width  # the scatter to ranks of the row
            next_in_row = row[0] + (rank + 1 - row[0]) % width
            sent += (width - 1) / width if width > 1 and next_in_row not in here else 0.0  # the gather's ring
            column = range(rank % width, ranks, width)
            sent += sum(1 for other in column if other not in here) / height / width
            below = (rank + width) % ranks
            sent += (height - 1) / height / width if height > 1 and below not in here else 0.0
        return sent

    repeated = math.lcm(each, width) // each  # nodes after which rows begin at the same place of a node again
    return max(across(node) for node in range(min(repeated, ranks // each)))


def _server_share(each: int, ranks: int, servers: int) -> float:
    """Return ``nic_share`` of parameter servers, for the first node, which has a server."""
    here = sum(1 for number in range(servers) if number * ranks // servers < each)
    return each * (servers - here) / servers + here * (ranks - each) / servers


def exchanges(collective: Collective, layout: RankLayout) -> int:
    """Return how many operations the host launches for one message."""
    inside = 2 if layout.row > 1 else 0
    match collective:
        case "native":
            return 1
        case "ring":
            return inside + 1
        case "butterfly":
            return inside + 2 * math.ceil(math.log2(layout.column)) if layout.column > 1 else inside
        case "hierarchical":
            return inside + 2
        case "pairwise" | "parameter_server":
            return 2
        case "torus2d":
            return 4 if 1 < layout.square_row < layout.size else 2
        case _:
            assert_never(collective)
