"""8-bit codes with one scale per block, the residual that they leave for later steps, and all-reduces of codes.

Error feedback: the error of a code stays with the rank that made the code and is added to the next step's value, so
nothing is lost (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847; in both halves of an all-reduce
as in 1-bit Adam, arXiv 2102.02888). Scales are bf16 numbers. Their product with an 8-bit code is exact in fp32, so the
residual is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.cost_model.collectives import BLOCK
from imagenet_fast.sync.comm_stream import CommStream, OpSequence
from imagenet_fast.sync.kept_state import Kept, cut, lay
from imagenet_fast.sync.param_slot import ParamSlot

PLAIN = torch.bfloat16
"""Dtype in which values without codes are sent: those inside a node, and blocks of norms, biases and slots' ends."""

_ALIGNMENT = 16  # bytes; NCCL moves what begins elsewhere byte by byte
_LARGEST = 127.0


def is_coded(wire: torch.dtype) -> bool:
    """Return whether values are sent as codes."""
    return wire == torch.int8


def encode(values: Tensor, scales: Tensor, codes: Tensor, residual: Tensor | None = None) -> None:
    """Write the codes of ``values``, a scale per block, and the error of the codes.

    A block that is not finite is encoded as one that is not finite, and its residual stays what it is.

    Args:
        values: fp32, (..., blocks, BLOCK).
        scales: Output, bf16, (..., blocks).
        codes: Output, int8, (..., blocks, BLOCK).
        residual: Output, in the shape of ``values``: the error; None: it is lost.
    """
    scales.copy_(values.abs().amax(-1) / _LARGEST)  # on a CPU vector_norm takes 20 times as long
    exact = scales.float().unsqueeze(-1)
    whole = (values * torch.where(exact >= torch.finfo(torch.float32).tiny, 1 / exact, 0.0)).round_()
    codes.copy_(whole)
    if residual is not None:
        finite = exact.isfinite()
        if values.is_cpu and finite.all():
            torch.addcmul(values, whole, exact, value=-1, out=residual)
        else:
            missed = torch.addcmul(values, whole, exact, value=-1)
            residual.copy_(torch.where(finite, missed, residual))


def decode(scales: Tensor, codes: Tensor) -> Tensor:
    """Return the fp32 values, (..., blocks, BLOCK), of ``codes`` with ``scales``."""
    return codes.float().mul_(scales.float().unsqueeze(-1))


class ErrorFeedback:
    """The residual of a pool's coded gradients on this rank: fp32, laid out as the pool.

    Messages hold it in pieces, which only their own codes change.
    """

    def __init__(self, slots: Sequence[ParamSlot], device: torch.device, kept: Kept) -> None:
        """Find the kind of every block, and lay out the residual for the messages to take.

        Args:
            slots: The pool's slots.
            device: Device of the residual.
            kept: The residual from before there were these messages; it is zero where there is none.
        """
        self._slots = slots
        blocks = slots[-1].stop // BLOCK
        self._kinds = torch.zeros(2, blocks, dtype=torch.bool)
        for slot in slots:
            first, last = slot.start // BLOCK, slot.flag // BLOCK
            self._kinds[0 if slot.param.dim() > 1 else 1, first:last] = True
            self._kinds[1, last] = True
        self._numbers = self._kinds.cumsum(1) - 1
        self._device = device
        self._left: Tensor | None = None
        if left := [own["residual"] for own in kept.values() if "residual" in own]:
            self._left = torch.zeros(slots[-1].stop, dtype=left[0].dtype, device=device)
            lay(kept, "residual", slots, self._left)
        self._shared: dict[int, Tensor] = {}
        self._pieces: list[tuple[Tensor, Tensor, Tensor, int]] = []

    def blocks(self, part: slice) -> BlockMap:
        """Return the block map of a part of the pool."""
        own = slice(part.start // BLOCK, part.stop // BLOCK)
        return BlockMap(self._kinds[:, own], self._numbers[:, own], own.start, self)

    def sum_shared(self, ranks: int, add_up: Callable[[Tensor], object]) -> None:
        """Declare that ``ranks`` ranks have rows in common from now on; ``add_up`` sums a tensor over these ranks."""
        if self._left is not None and ranks not in self._shared:
            left = self._left.to(torch.float64, copy=True)  # on all ranks, whatever ``by_name`` returned on this one
            add_up(left)
            self._shared[ranks] = (left / ranks).float()

    def rows_of(self, blocks: Tensor, real: Tensor, sharing: int) -> Tensor:
        """Hand over the residual of ``blocks`` to the caller, as rows.

        Args:
            blocks: Numbers of the blocks in the pool, with repetitions.
            real: Places in ``blocks`` that are not repetitions.
            sharing: Number of ranks that have the rows in common. The rows are in the units of these ranks' mean.
        """
        rows = torch.zeros(len(blocks), BLOCK, dtype=torch.float32, device=self._device)
        if self._left is not None:
            left = self._left if sharing == 1 else self._shared[sharing]
            rows.copy_(left.view(-1, BLOCK).index_select(0, blocks))
        self._pieces.append((blocks, rows, real, sharing))
        return rows

    @property
    def rows(self) -> list[Tensor]:
        """The rows that were handed over."""
        return [rows for _, rows, _, _ in self._pieces]

    def adopted(self) -> None:
        """Forget the initial residual, because all messages have taken theirs."""
        self._left = None
        self._shared.clear()

    def by_name(self) -> Kept:
        """Return this rank's whole residual. Nothing may be in flight."""
        powers_of_2 = all(sharing & (sharing - 1) == 0 for *_, sharing in self._pieces)
        exact = torch.float32 if powers_of_2 else torch.float64  # in which the products below are not rounded
        left = torch.zeros(self._kinds.shape[1], BLOCK, dtype=exact, device=self._device)
        for blocks, rows, real, sharing in self._pieces:
            left.index_copy_(0, blocks[real], rows[real].to(exact) * sharing)
        return cut(self._slots, residual=left.view(-1))


@dataclass(frozen=True)
class BlockMap:
    """The kinds and numbers of a message's blocks."""

    kinds: Tensor
    """True in row 0 if a block is sent as codes, in row 1 if it is sent plain; neither if it has no values."""
    numbers: Tensor
    """The block's number among those of its kind in the whole pool, by row as ``kinds``.

    It decides the block's owner, so all ranks own equally many.
    """
    first: int
    """The first block's number in the pool."""
    residual: ErrorFeedback | None
    """The residual that keeps the error of the codes; None: the error is lost."""

    def part(self, number: int, parts: int) -> BlockMap:
        """Return part ``number`` of ``parts`` equal ones."""
        size, rest = divmod(self.kinds.shape[1], parts)
        assert not rest, "a message must be cut between blocks"
        own = slice(number * size, (number + 1) * size)
        return BlockMap(self.kinds[:, own], self.numbers[:, own], self.first + own.start, self.residual)


def all_coded(elements: int) -> BlockMap:
    """Return the blocks of a message that lies in no pool: all have codes, and no residual is kept."""
    kinds = torch.tensor([[True], [False]]).repeat(1, elements // BLOCK)
    return BlockMap(kinds, kinds.cumsum(1) - 1, 0, None)


class Packer:
    """A message's blocks as rows, by owner, and their form on the wire.

    A block's owner follows from the pool alone. Every owner has equally many rows, so some of them are repetitions,
    which no rank reads.
    """

    def __init__(self, blocks: BlockMap, owners: int, device: torch.device, sharing: int = 1) -> None:
        """Assign the blocks to owners, and take their residual.

        Args:
            blocks: The message's blocks.
            owners: Number of owners.
            device: Device of the rows.
            sharing: Number of ranks that have the residual in common.
        """
        self._device = device
        coded, coded_rows = _by_owner(blocks.kinds[0], blocks.numbers[0], owners)
        plain, plain_rows = _by_owner(blocks.kinds[1], blocks.numbers[1], owners)
        self._codes, self._plains = coded.shape[1], plain.shape[1]
        self._filled = self._codes * (2 + BLOCK) + self._plains * 2 * BLOCK
        self.width = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
        """Bytes on the wire of one owner's rows, and of the gap that aligns the next owner's."""
        self._chosen = torch.cat([coded.flatten(), plain.flatten()]).to(device)
        back = torch.full_like(blocks.numbers[0], len(self._chosen))  # the last row has no values
        back[coded.flatten()[coded_rows]] = coded_rows
        back[plain.flatten()[plain_rows]] = plain_rows + coded.numel()
        self._back = back.to(device)
        self._rows = torch.zeros(len(self._chosen) + 1, BLOCK, dtype=torch.float32, device=device)
        self.coded = self._rows[: coded.numel()].view(owners, -1, BLOCK)
        self.plain = self._rows[coded.numel() : -1].view(owners, -1, BLOCK)
        self.residual: Tensor | None = None
        """The residual of the rows with codes, in the shape of ``coded``; None if the error is lost."""
        if blocks.residual is not None:
            own = (coded.flatten() + blocks.first).to(device)
            self.residual = blocks.residual.rows_of(own, coded_rows.to(device), sharing).view(self.coded.shape)

    def load(self, values: Tensor) -> None:
        """Copy ``values`` into the rows, and add the residual to the rows with codes."""
        blocks = values.view(-1, BLOCK)
        if values.dtype == torch.float32:
            torch.index_select(blocks, 0, self._chosen, out=self._rows[:-1])
        else:
            self._rows[:-1] = blocks[self._chosen]
        if self.residual is not None:
            self.coded += self.residual

    def land(self, values: Tensor) -> None:
        """Copy the rows into ``values``."""
        if values.dtype == torch.float32:
            torch.index_select(self._rows, 0, self._back, out=values.view(-1, BLOCK))
        else:
            values.view(-1, BLOCK).copy_(self._rows[self._back])

    def message(self, owners: int) -> Tensor:
        """Return an empty uint8 tensor of shape (owners, width), for that many owners' rows on the wire.

        The gaps are 0, so that what is sent does not depend on what was in memory before.
        """
        message = torch.empty(owners, self.width, dtype=torch.uint8, device=self._device)
        message[:, self._filled :] = 0
        return message

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a message: its scales, codes and plain values."""
        sizes = [2 * self._codes, self._codes * BLOCK, 2 * self._plains * BLOCK]
        scales, coded, plain, _ = message.split([*sizes, self.width - self._filled], -1)
        return (
            scales.view(torch.bfloat16), coded.view(torch.int8).unflatten(-1, (self._codes, BLOCK)),
            plain.view(PLAIN).unflatten(-1, (self._plains, BLOCK)),
        )  # fmt: skip


def coded_pairwise(
    chain: OpSequence, values: Tensor, packing: Packer, push: CommStream, pull: CommStream, direct: bool
) -> None:
    """Average ``values`` over the streams' ranks, in place, by sending codes straight to the owners of their blocks.

    No backend adds codes, so a block's owner decodes, adds in fp32 and encodes the sum. ``push`` leads to the owners;
    they send the codes of the means to all ranks, by ``pull``, ``direct`` or not (see ``CommStream.all_gather``).

    Every rank encodes every value once, as a part that it sends or as a sum that it owns. Either way the error of the
    codes is in the units of the sum, so one residual serves both.
    """
    ranks, mine = push.size, push.place
    leaving, arrived, means = packing.message(ranks).zero_(), packing.message(ranks), packing.message(ranks)

    def leave() -> Work | None:
        packing.load(values)
        scales, codes, plain = packing.parts(leaving)
        plain.copy_(packing.plain)
        for others in (slice(0, mine), slice(mine + 1, None)):  # a rank adds its own part uncoded: its codes stay 0
            if len(scales[others]):
                left = None if packing.residual is None else packing.residual[others]
                encode(packing.coded[others], scales[others], codes[others], left)
        return push.all_to_all(arrived, leaving)

    def answer() -> Work | None:
        scales, codes, plain = packing.parts(arrived)
        own_scales, own_codes, own_plain = packing.parts(means[mine])
        left = None if packing.residual is None else packing.residual[mine]
        encode(decode(scales, codes).sum(0).add_(packing.coded[mine]), own_scales, own_codes, left)
        torch.div(plain.sum(0, dtype=torch.float32), ranks, out=own_plain)
        return pull.all_gather(means.view(-1), direct)

    def land() -> None:
        scales, codes, plain = packing.parts(means)
        torch.div(decode(scales, codes), ranks, out=packing.coded)
        packing.plain.copy_(plain)
        packing.land(values)

    chain.add_collective(push, leave)
    chain.add_collective(pull, answer, second_half=True)
    chain.add_local(land)


def _by_owner(chosen: Tensor, numbers: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Return the chosen blocks, a row per owner filled up with repetitions, and the flat places of the others."""
    places = chosen.nonzero().flatten()
    owner = numbers[places] % owners
    counts = torch.bincount(owner, minlength=owners)
    width = int(counts.max())
    table = places[:1].expand(owners, width).clone()
    order = owner.argsort(stable=True)
    within = torch.arange(len(places)) - (counts.cumsum(0) - counts)[owner[order]]
    real = owner[order] * width + within
    table.view(-1)[real] = places[order]
    return table, real
