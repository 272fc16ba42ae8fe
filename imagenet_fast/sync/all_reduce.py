"""All-reduces over a flat tensor, as lists of ops: built once per message, run once per step.

By default each part is sent straight to its owner, which adds up in fp32, rounds once and sends the mean to all
(``scatter``, ``gather``). That is a ring's bytes in two calls, whatever the number of ranks. On a 16-bit wire the error
does not grow with the number of ranks, as it does where partial sums are rounded at every hop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imagenet_fast.cost_model import collectives
from imagenet_fast.cost_model.collectives import WireFormat
from imagenet_fast.recipe.sync_table import Collective, Wire
from imagenet_fast.sync.butterfly import butterfly
from imagenet_fast.sync.comm_stream import CommOp, CommStream, OpSequence
from imagenet_fast.sync.quantization import PLAIN, BlockMap, Packer, all_coded, coded_pairwise, is_coded
from imagenet_fast.sync.topology import Topology

_DTYPES: dict[Wire, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8
}  # fmt: skip


def all_reduce(
    values: Tensor, wire: torch.dtype, collective: Collective | None, topology: Topology, servers: int = 1,
    direct: bool = False, lane: str = "", blocks: BlockMap | None = None,
) -> list[CommOp]:  # fmt: skip
    """Build the ops that average a 1-D tensor over all ranks, in place.

    Every rank must build and launch the same lists in the same order. All ranks end with the same bits. Sums are made
    in fp32 and rounded once per level. The exception is the backend's own all-reduce (``native``, and ``ring`` between
    nodes), which adds in the wire dtype.

    With an 8-bit wire, values are sent as codes and, inside the rows of a collective of two levels, as 16-bit values.
    Between rows every collective then works as ``pairwise``, because no backend adds codes.

    ``hierarchical`` reduce-scatters inside the node, averages between ranks of the same place in their nodes, and
    gathers inside the node. So a node's link carries no more than one node's share (Mikami et al., arXiv 1811.05233;
    NCCL's blog on massively scaled training). ``ring`` and ``butterfly`` do so around their own algorithm where there
    are several equal nodes of several ranks each.

    Args:
        values: 1-D; its length is a multiple of ``collectives.message_alignment``.
        wire: Dtype in which values are sent; values of a dtype that is no wider are sent as they are.
        collective: The algorithm; None: the usual one, see ``cost_model.collectives``.
        topology: The ranks to average over.
        servers: Number of servers of a ``parameter_server``.
        direct: Whether to scatter and gather, each in one step, wherever there is a choice; see
            ``CommStream.all_gather``.
        lane: Name of the lane; messages of different lanes do not queue behind each other.
        blocks: Which blocks have no codes, and where the error of the codes is kept. None: all have codes, and the
            error is lost.

    Returns:
        The ops. Empty with one rank or without values: nothing is sent and nothing is rounded.
    """
    if topology.size == 1 or not values.numel():
        return []
    wire = wire_for(values.dtype, wire, topology)
    collective = collective or collectives.usual_collective(topology.layout, format_of(wire))
    alignment = collectives.message_alignment(topology.layout, format_of(wire))
    assert values.numel() % alignment == 0, "a message must be cut evenly"
    chain = OpSequence()
    if is_coded(wire) and blocks is None:
        blocks = all_coded(values.numel())
    row, column = topology.grid(collective)
    _average(chain, values, _Way(wire, collective, topology, row, column, servers, direct, lane, blocks))
    chain.close(topology.stream((), lane + "landing"))
    return chain.ops


@dataclass(frozen=True)
class _Way:
    """The settings of one message's all-reduce."""

    wire: torch.dtype
    collective: Collective
    topology: Topology
    row: tuple[int, ...]
    column: tuple[int, ...]
    servers: int
    direct: bool
    lane: str
    blocks: BlockMap | None
    """The message's blocks, for a wire of codes."""

    def stream(self, ranks: tuple[int, ...], role: str) -> CommStream:
        return self.topology.stream(ranks, self.lane + role)


def _average(chain: OpSequence, values: Tensor, way: _Way) -> None:
    """Add the ops: reduce inside the rows, average between the rows, gather inside the rows."""
    collective, coded = way.collective, is_coded(way.wire)
    wire = wire_for(values.dtype, PLAIN, way.topology) if coded else way.wire
    short = wire != values.dtype
    inside, ranks = len(way.row), len(way.column)
    coded = coded and ranks > 1
    message = torch.empty_like(values, dtype=wire) if short and (inside > 1 or not coded) else values
    halving = collective == "butterfly" and not coded
    whole = collective == "hierarchical" and wire.itemsize >= 4 and not short and not way.direct
    backend_adds = not coded and (whole or collective in ("native", "ring"))
    # A 16-bit sum made by the backend or by a butterfly could overflow, so values are divided first.
    early = ranks if wire.itemsize < 4 and (backend_adds or halving) else 1
    exact = torch.promote_types(values.dtype, torch.float32)
    if inside > 1:
        if short:
            chain.add_local(lambda: message.copy_(values))
        own = values.new_empty(values.numel() // inside, dtype=exact) if (halving or coded) and wire != exact else None
        shard = scatter(chain, message, way.stream(way.row, "scatter"), own, inside * early)
    elif coded:
        shard = values
    elif halving:
        shard = values if values.dtype == exact else torch.empty_like(values, dtype=exact)
        if early > 1:
            chain.add_local(lambda: torch.div(values, early, out=shard))
    else:
        shard = message
        if early > 1 or short:
            chain.add_local(lambda: torch.mul(values, 1 / early, out=message))
    mean = backend_adds and early == 1 and values.is_cuda
    if coded:
        _between_coded(chain, shard, way)
    elif ranks > 1:
        _between(chain, shard, way, backend_adds, mean)
    if ((backend_adds and not mean) or halving) and early == 1 and ranks > 1:
        chain.add_local(lambda: shard.div_(ranks))
    arrived = shard
    if inside > 1:
        if own is not None:
            part = message.view(inside, -1)[way.row.index(way.topology.rank)]
            chain.add_local(lambda: part.copy_(own))
        pull = way.stream(way.row, "gather")
        chain.add_collective(pull, lambda: pull.all_gather(message, way.direct), second_half=True)
        arrived = message
    if arrived is not values:
        chain.add_local(lambda: values.copy_(arrived))


def _between(chain: OpSequence, shard: Tensor, way: _Way, backend_adds: bool, mean: bool) -> None:
    def stream(role: str) -> CommStream:
        return way.stream(way.column, role)

    if backend_adds:
        whole = stream("all-reduce")
        chain.add_collective(whole, lambda: whole.all_reduce(shard, mean=mean))
    elif way.collective == "butterfly":
        steps = stream("butterfly")
        chain.add_collective(steps, lambda: butterfly(shard, way.wire, steps))
    elif way.collective == "parameter_server":
        parameter_server(chain, shard, stream("scatter"), stream("gather"), way.servers)
    else:
        scatter(chain, shard, stream("scatter"), None, len(way.column))
        pull = stream("gather")
        chain.add_collective(pull, lambda: pull.all_gather(shard, way.direct), second_half=True)


def _between_coded(chain: OpSequence, shard: Tensor, way: _Way) -> None:
    assert way.blocks is not None
    ranks, inside = way.column, len(way.row)
    blocks = way.blocks.part(way.row.index(way.topology.rank), inside)
    if blocks.residual is not None and inside > 1:
        row = way.stream(way.row, "residual")
        blocks.residual.sum_shared(inside, lambda left: row.submit(CommOp(row, lambda: row.all_reduce(left)))())
    push, pull = (way.stream(ranks, role) for role in ("scatter", "gather"))
    if blocks.kinds.any():  # else there is only padding
        packing = Packer(blocks, len(ranks), shard.device, inside)
        coded_pairwise(chain, shard, packing, push, pull, way.direct)


def wire_dtype(wire: Wire) -> torch.dtype:
    """Return the torch dtype of a wire dtype's name."""
    return _DTYPES[wire]


def wire_for(dtype: torch.dtype, wire: torch.dtype, topology: Topology) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are sent.

    It is never wider than ``dtype``. With one rank, and where the wire is fp32, it is ``dtype``, so that nothing is
    rounded: float64 is sent as it is.
    """
    rounds = wire != torch.float32 and wire.itemsize < dtype.itemsize
    return wire if rounds and topology.size > 1 else dtype


def format_of(wire: torch.dtype) -> WireFormat:
    """Return the form in which values of a wire dtype are sent."""
    return WireFormat(wire.itemsize, is_coded(wire))


def scatter(chain: OpSequence, values: Tensor, stream: CommStream, own: Tensor | None, divisor: int) -> Tensor:
    """Add the op that sums this rank's part of ``values`` over the stream and divides it by ``divisor``.

    Args:
        chain: Where the op is added.
        values: 1-D, with one part per rank.
        stream: The ranks.
        own: Where the result is written, or None for this rank's part of ``values``.
        divisor: Number by which the sum is divided.

    Returns:
        The tensor that holds the result once the op is done.
    """
    into = values.view(stream.size, -1)[stream.place] if own is None else own
    if own is None and divisor == stream.size and values.dtype == torch.float32 and values.is_cuda:
        chain.add_collective(stream, lambda: stream.reduce_scatter(values))  # NCCL adds fp32 itself, without a copy
        return into
    arrived = torch.empty_like(values)
    chain.add_collective(stream, lambda: stream.all_to_all(arrived, values))
    chain.add_local(lambda: mean_of(arrived, stream.size, divisor, into))
    return into


def parameter_server(chain: OpSequence, values: Tensor, push: CommStream, pull: CommStream, servers: int) -> None:
    """Average ``values`` over the streams' ranks, in place; each of ``servers`` ranks adds up a part in fp32.

    It is the starting point of the papers that this package follows. Servers are spread evenly among the ranks. A
    server's link carries P-1 parts in and P-1 parts out. Ranks send over ``push``, and servers answer over ``pull``.
    """
    ranks, servers = push.size, min(servers, push.size)
    parts = [0] * ranks
    for place, part in zip((n * ranks // servers for n in range(servers)), values.tensor_split(servers), strict=True):
        parts[place] = part.numel()
    own = parts[push.place]  # 0 unless this rank is a server
    arrived = values.new_empty(own * ranks)
    chain.add_collective(push, lambda: push.all_to_all(arrived, values, [own] * ranks, parts))

    def answer() -> Tensor:
        mean = values.new_empty(own)
        if own:
            mean_of(arrived, ranks, ranks, mean)
        return mean.repeat(ranks)

    chain.add_collective(pull, lambda: pull.all_to_all(values, answer(), parts, [own] * ranks), second_half=True)


def mean_of(arrived: Tensor, ranks: int, divisor: int, own: Tensor) -> None:
    """Write the sum of ``ranks`` parts over ``divisor`` into ``own``, added in at least fp32 and rounded once."""
    exact = torch.promote_types(arrived.dtype, torch.float32)
    torch.div(arrived.view(ranks, -1).sum(0, dtype=exact), divisor, out=own)
