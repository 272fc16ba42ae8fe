"""All-reduces over a flat tensor, as lists of phases: made once for a message, carried once a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from imagenet_fast.recipe.sync_config import Collective
from imagenet_fast.sync.collectives.butterfly import butterfly, butterfly_bytes, core_of
from imagenet_fast.sync.collectives.comm_ops import AllReduceHandle, CommOp, OpSequence, carry
from imagenet_fast.sync.collectives.parameter_server import parameter_server, server_bytes, server_places
from imagenet_fast.sync.collectives.quantized import coded_butterfly, coded_pairwise
from imagenet_fast.sync.collectives.reduce_scatter_all_gather import gather, scatter
from imagenet_fast.sync.comm_stream import CommStream
from imagenet_fast.sync.quantization import BLOCK, PLAIN, BlockMap, Packer, all_coded, is_coded
from imagenet_fast.sync.topology import Grid, Topology

__all__ = [
    "AllReduceHandle",
    "CommOp",
    "all_reduce",
    "carry",
    "cost_of",
    "line_of",
    "piece_bytes",
    "piece_elements",
    "usual_collective",
    "wire_for",
]


def all_reduce(
    values: Tensor, wire: torch.dtype, collective: Collective, topology: Topology, servers: int = 1, cut: bool = False,
    lane: str = "", blocks: BlockMap | None = None,
) -> list[CommOp]:  # fmt: skip
    """The phases that average a 1-D tensor over all ranks, in place, its values travelling as ``wire``, or as they are
    where that is no wider.

    Its length is a multiple of :func:`line_of`. Every rank must make and carry the same lists in the same order. With
    one rank nothing is sent and nothing is rounded. All ranks end with the same bits. Sums are made in fp32 and rounded
    once a level, but for the backend's own all-reduce (``native``, and ``ring`` between nodes), which adds in the
    wire's dtype. ``cut``: of phases of two halves wherever there is a choice. ``lane``: messages of different
    lanes do not queue behind each other.

    A wire of 8 bits is one of codes, between nodes; inside values travel in 16 bits. No backend adds codes up, so there
    ``native`` and ``ring`` are ``pairwise``. ``blocks`` say which values have no codes, and where that is kept which
    codes miss; without them all have, and it is lost.

    ``hierarchical``: scattered inside the node, averaged between the equal places of the nodes, gathered inside, so a
    node's link carries no more than a node's share (Mikami et al., arXiv 1811.05233, whose ``torus2d`` is the same on a
    square; NCCL's blog on massively scaled training). ``ring`` and ``butterfly`` do that around theirs wherever nodes
    have several ranks.
    """
    if topology.size == 1 or not values.numel():
        return []
    wire = wire_for(values.dtype, wire, topology)
    assert values.numel() % line_of(wire, topology) == 0, "a message must be cut evenly"
    match collective:
        case "native" | "pairwise" | "parameter_server":
            grid = topology.flat
        case "hierarchical":
            grid = topology.by_node
        case "torus2d":
            grid = topology.square
        case "ring" | "butterfly":
            grid = topology.levels
        case _:
            assert_never(collective)
    chain = OpSequence()
    if is_coded(wire) and blocks is None:
        blocks = all_coded(values.numel())
    _average(chain, values, _Way(wire, collective, topology, servers, cut, lane, blocks), grid)
    chain.land(topology.channel((), lane + "landing"))
    return chain.phases


@dataclass(frozen=True)
class _Way:
    """How a message travels."""

    wire: torch.dtype
    collective: Collective
    topology: Topology
    servers: int
    cut: bool
    lane: str
    blocks: BlockMap | None
    """Of a wire of codes."""

    def channel(self, ranks: tuple[int, ...], role: str) -> CommStream:
        return self.topology.channel(ranks, self.lane + role)


def _average(chain: OpSequence, values: Tensor, way: _Way, grid: Grid) -> None:
    """Inside the rows, between them, inside again."""
    collective, coded = way.collective, is_coded(way.wire)
    wire = wire_for(values.dtype, PLAIN, way.topology) if coded else way.wire
    short = wire != values.dtype
    inside, ranks = len(grid.row), len(grid.column)
    coded = coded and ranks > 1
    message = torch.empty_like(values, dtype=wire) if short and (inside > 1 or not coded) else values
    halving = collective == "butterfly" and not coded
    whole = collective == "hierarchical" and wire.itemsize >= 4 and not short and not way.cut
    backend_adds = not coded and (whole or collective in ("native", "ring"))
    # A sum of 16-bit values that the backend or a butterfly makes could overflow, so they are divided before.
    early = ranks if wire.itemsize < 4 and (backend_adds or halving) else 1
    exact = torch.promote_types(values.dtype, torch.float32)
    if inside > 1:
        if short:
            chain.locally(lambda: message.copy_(values))
        own = values.new_empty(values.numel() // inside, dtype=exact) if (halving or coded) and wire != exact else None
        shard = scatter(chain, message, way.channel(grid.row, "scatter"), own, inside * early)
    elif coded:
        shard = values
    elif halving:
        shard = values if values.dtype == exact else torch.empty_like(values, dtype=exact)
        if early > 1:
            chain.locally(lambda: torch.div(values, early, out=shard))
    else:
        shard = message
        if early > 1 or short:
            chain.locally(lambda: torch.mul(values, 1 / early, out=message))
    mean = backend_adds and early == 1 and values.is_cuda
    if coded:
        _between_coded(chain, shard, way, grid)
    elif ranks > 1:
        _between(chain, shard, way, grid.column, backend_adds, mean)
    if ((backend_adds and not mean) or halving) and early == 1 and ranks > 1:
        chain.locally(lambda: shard.div_(ranks))
    arrived = shard
    if inside > 1:
        if own is not None:
            part = message.view(inside, -1)[grid.row.index(way.topology.rank)]
            chain.locally(lambda: part.copy_(own))
        gather(chain, message, way.channel(grid.row, "gather"), way.cut)
        arrived = message
    if arrived is not values:
        chain.locally(lambda: values.copy_(arrived))


def _between(
    chain: OpSequence, shard: Tensor, way: _Way, ranks: tuple[int, ...], backend_adds: bool, mean: bool
) -> None:
    def channel(role: str) -> CommStream:
        return way.channel(ranks, role)

    if backend_adds:
        whole = channel("all-reduce")
        chain.over(whole, lambda: whole.all_reduce(shard, mean=mean))
    elif way.collective == "butterfly":
        steps = channel("butterfly")
        chain.over(steps, lambda: butterfly(shard, way.wire, steps))
    elif way.collective == "parameter_server":
        parameter_server(chain, shard, channel("scatter"), channel("gather"), way.servers)
    else:
        scatter(chain, shard, channel("scatter"), None, len(ranks))
        gather(chain, shard, channel("gather"), way.cut)


def _between_coded(chain: OpSequence, shard: Tensor, way: _Way, grid: Grid) -> None:
    assert way.blocks is not None
    ranks, inside = grid.column, len(grid.row)
    blocks = way.blocks.part(grid.row.index(way.topology.rank), inside)
    if blocks.residual is not None and inside > 1:
        row = way.channel(grid.row, "residual")
        blocks.residual.share(inside, lambda left: carry([CommOp(row, lambda: row.all_reduce(left), False)]).wait())
    halving = way.collective == "butterfly"
    channels = [way.channel(ranks, role) for role in (["butterfly"] if halving else ["scatter", "gather"])]
    if not blocks.kinds.any():
        return  # nothing but what spans are filled up with
    owners = list(range(len(core_of(len(ranks))) if halving else len(ranks)))
    if way.collective == "parameter_server":
        owners = server_places(len(ranks), way.servers)
    packing = Packer(blocks, len(owners), way.wire, shard.device, inside)
    if halving:
        (steps,) = channels
        chain.over(steps, lambda: coded_butterfly(shard, packing, steps))
    else:
        push, pull = channels
        coded_pairwise(chain, shard, packing, push, pull, owners, way.cut)


def wire_for(dtype: torch.dtype, wire: torch.dtype, topology: Topology) -> torch.dtype:
    """What values of ``dtype`` travel as: never wider than they are, and unrounded where they go nowhere."""
    return wire if wire.itemsize < dtype.itemsize and topology.size > 1 else dtype


def usual_collective(dtype: torch.dtype, wire: torch.dtype, topology: Topology) -> Collective:
    """What to take where nobody has chosen: by levels where nodes have several ranks; between nodes 16-bit values
    are added up in fp32. Inside one node, and for a wire of 32 bits, the backend's own."""
    if topology.levels != topology.flat:
        return "hierarchical"
    if is_coded(wire):
        return "pairwise"
    several = len(topology.nodes) > 1
    return "pairwise" if several and wire_for(dtype, wire, topology).itemsize < 4 else "native"


def piece_bytes(topology: Topology) -> int:
    """A long message travels in pieces of this many bytes, so that one is added up while the next is under way; every
    rank's share of a piece still outweighs a message's latency."""
    return max(2**24 if topology.device.type != "cpu" else 2**19, 2**16 * topology.size)


def piece_elements(wire: torch.dtype, topology: Topology) -> int:
    """The same in values of the wire's dtype, and to be cut evenly."""
    line = line_of(wire, topology)
    return -(-(piece_bytes(topology) // wire.itemsize) // line) * line


def line_of(wire: torch.dtype, topology: Topology) -> int:
    """A message of a multiple of so many elements can be cut evenly on every level, and between blocks of codes."""
    if not is_coded(wire):
        return topology.line
    return math.lcm(topology.line, BLOCK * math.lcm(len(topology.levels.row), len(topology.square.row)))


def cost_of(collective: Collective, topology: Topology, servers: int = 1) -> float:
    """How long a long message keeps the wire busy, in units of a ring's."""
    match collective:
        case "butterfly":
            return butterfly_bytes(len(topology.levels.column))
        case "parameter_server":
            return server_bytes(topology.size, servers)
        case _:
            return 1.0
