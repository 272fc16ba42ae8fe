"""Values as 8-bit codes with a scale a block, and what the codes leave behind for later steps.

Error feedback: what a code misses of a value stays with the rank that made the code, and is added to the value of the
next step, so nothing is lost (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847; in both halves of
an all-reduce as in 1-bit Adam, arXiv 2102.02888). Scales are bf16 numbers: times a code of 8 bits they are exact in
fp32, so what is left behind is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from imagenet_fast.sync.param_slot import ParamSlot, move

BLOCK = 512
"""Values with a common scale. Blocks lie on the pool's grid, so which gradients travel together changes no bit."""

PLAIN = torch.bfloat16
"""What values without codes travel as: inside a node, and in blocks of norms, of biases and of spans' ends."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_coded(wire: torch.dtype) -> bool:
    """Whether values travel as codes."""
    return wire in _LARGEST


def encode(values: Tensor, scales: Tensor, codes: Tensor, feedback: Feedback | None = None) -> None:
    """Write the codes of fp32 ``values`` (..., blocks, BLOCK), a bf16 scale a block, and what they miss.

    A block that is not finite becomes one that is not, and leaves behind what it had left before.
    """
    scales.copy_(values.abs().amax(-1) / _LARGEST[codes.dtype])  # on a CPU vector_norm takes 20 times as long
    exact = scales.float().unsqueeze(-1)
    whole = values * torch.where(exact >= torch.finfo(torch.float32).tiny, 1 / exact, 0.0)
    if codes.dtype == torch.int8:
        codes.copy_(whole.round_())
    else:
        codes.copy_(whole)
        whole = codes.float()
    if feedback is not None:
        finite = exact.isfinite()
        if values.is_cpu and finite.all():
            torch.addcmul(values, whole, exact, value=-1, out=feedback.missed)
        else:
            missed = torch.addcmul(values, whole, exact, value=-1)
            feedback.missed.copy_(torch.where(finite, missed, feedback.added))


def decode(scales: Tensor, codes: Tensor) -> Tensor:
    """The fp32 values (..., blocks, BLOCK) of codes."""
    return codes.float().mul_(scales.float().unsqueeze(-1))


@dataclass(frozen=True)
class Feedback:
    """The error feedback of some rows, in one step."""

    added: Tensor
    """What codes had left behind before."""
    missed: Tensor
    """What they leave behind now. It lies apart, for the step may be dropped."""

    def __getitem__(self, rows: int | slice) -> Feedback:
        return Feedback(self.added[rows], self.missed[rows])

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Feedback:
        return Feedback(self.added.unflatten(dim, sizes), self.missed.unflatten(dim, sizes))

    def select(self, dim: int, index: int) -> Feedback:
        return Feedback(self.added.select(dim, index), self.missed.select(dim, index))


class FeedbackRows:
    """What the codes of some rows leave behind: twice, for a step that is dropped must leave no trace."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        """After the last step that was not dropped."""
        self._spare = torch.zeros_like(rows)
        self._stepped = False

    def step(self) -> Feedback:
        """Begin a step."""
        added, missed = self.rows, self._spare
        self.rows, self._spare = missed, added
        self._stepped = True
        return Feedback(added, missed)

    def drop(self) -> None:
        """Forget the last step."""
        if self._stepped:
            self.rows, self._spare = self._spare, self.rows
            self._stepped = False


class ErrorFeedback:
    """What the codes of a pool's gradients have left behind: fp32, by the pool's elements, on this rank.

    Messages hold it in pieces, which only their codes change. ``left`` is what there was before those messages.
    """

    def __init__(self, spans: Sequence[ParamSlot], device: torch.device, left: Tensor | None = None) -> None:
        self._spans = spans
        blocks = spans[-1].stop // BLOCK
        self._kinds = torch.zeros(2, blocks, dtype=torch.bool)
        for span in spans:
            first, last = span.start // BLOCK, span.flag // BLOCK
            self._kinds[0 if span.param.dim() > 1 else 1, first:last] = True
            self._kinds[1, last] = True
        self._numbers = _numbered(self._kinds)
        self._device = device
        self._left = left
        self._shared: dict[int, Tensor] = {}
        self._pieces: list[tuple[Tensor, FeedbackRows, Tensor, int]] = []

    def blocks(self, part: slice) -> BlockMap:
        """Those of a part of the pool."""
        own = slice(part.start // BLOCK, part.stop // BLOCK)
        return BlockMap(self._kinds[:, own], self._numbers[:, own], own.start, self)

    def share(self, ranks: int, add_up: Callable[[Tensor], object]) -> None:
        """So many ranks, over which ``add_up`` sums a tensor, have rows in common from now on."""
        if self._left is not None and ranks not in self._shared:
            left = self._left.clone()
            add_up(left)
            self._shared[ranks] = left / ranks

    def take(self, blocks: Tensor, real: Tensor, sharing: int) -> FeedbackRows:
        """Rows of what ``blocks`` of the pool have left behind, from now on theirs who asks; those that are not at
        ``real`` places are repetitions. Of rows that ``sharing`` ranks have in common, in the units of their mean."""
        rows = torch.zeros(len(blocks), BLOCK, device=self._device)
        if self._left is not None:
            left = self._left if sharing == 1 else self._shared[sharing]
            torch.index_select(left.view(-1, BLOCK), 0, blocks, out=rows)
        feedback = FeedbackRows(rows)
        self._pieces.append((blocks, feedback, real, sharing))
        return feedback

    def arranged(self) -> None:
        """All messages have taken what is theirs."""
        self._left = None
        self._shared.clear()

    def gathered(self) -> Tensor:
        """All that is left behind on this rank, by the pool's elements. Nothing may be under way."""
        left = torch.zeros(self._kinds.shape[1], BLOCK, device=self._device)
        for blocks, feedback, real, sharing in self._pieces:
            left.index_copy_(0, blocks[real], feedback.rows[real] * sharing)
        return left.view(-1)

    def drop(self) -> None:
        """Forget the last step. Nothing may be under way."""
        for _, feedback, _, _ in self._pieces:
            feedback.drop()

    def scale(self, ratio: Tensor) -> None:
        """Multiply everything. Nothing may be under way."""
        for _, feedback, _, _ in self._pieces:
            feedback.rows.mul_(ratio)

    def moved(self, spans: Sequence[ParamSlot]) -> Tensor:
        """The same, where the parameters have the places of other ``spans``."""
        left = self.gathered()
        moved = left.new_zeros(spans[-1].stop)
        move(left, self._spans, moved, spans)
        return moved


@dataclass(frozen=True)
class BlockMap:
    """Of a message, by block."""

    kinds: Tensor
    """Whether it travels as codes, and whether plain; neither: it has no values."""
    numbers: Tensor
    """Its number among those of its kind in the whole pool, by which its owner is found: so all own equally many."""
    first: int
    """The place of the first in the pool."""
    residual: ErrorFeedback | None
    """None: nothing is kept of what codes miss."""

    def part(self, number: int, parts: int) -> BlockMap:
        """One of equally many ``parts``."""
        size, rest = divmod(self.kinds.shape[1], parts)
        assert not rest, "a message must be cut between blocks"
        own = slice(number * size, (number + 1) * size)
        return BlockMap(self.kinds[:, own], self.numbers[:, own], self.first + own.start, self.residual)


def all_coded(elements: int) -> BlockMap:
    """Blocks of a message that lies in no pool."""
    kinds = torch.tensor([[True], [False]]).repeat(1, elements // BLOCK)
    return BlockMap(kinds, _numbered(kinds), 0, None)


class Packer:
    """A message's blocks in rows, by owner, and those rows on the wire.

    A block's owner follows from the pool alone. Every owner has equally many rows, so those of some are
    repetitions, which nobody reads.
    """

    def __init__(
        self, blocks: BlockMap, owners: int, wire: torch.dtype, device: torch.device, sharing: int = 1
    ) -> None:
        self._wire, self._device = wire, device
        coded, coded_rows = _by_owner(blocks.kinds[0], blocks.numbers[0], owners)
        plain, plain_rows = _by_owner(blocks.kinds[1], blocks.numbers[1], owners)
        self._codes, self._plains = coded.shape[1], plain.shape[1]
        self.width = self._codes * (2 + BLOCK) + self._plains * 2 * BLOCK
        """Bytes on the wire, of an owner's rows."""
        self._chosen = torch.cat([coded.flatten(), plain.flatten()]).to(device)
        back = torch.full_like(blocks.numbers[0], len(self._chosen))  # the last row has no values
        back[coded.flatten()[coded_rows]] = coded_rows
        back[plain.flatten()[plain_rows]] = plain_rows + coded.numel()
        self._back = back.to(device)
        self._rows = torch.zeros(len(self._chosen) + 1, BLOCK, device=device)
        self.coded = self._rows[: coded.numel()].view(owners, -1, BLOCK)
        self.plain = self._rows[coded.numel() : -1].view(owners, -1, BLOCK)
        self.feedback: Feedback | None = None
        """Of the step under way, as ``coded``."""
        self._left: FeedbackRows | None = None
        if blocks.residual is not None:
            own = (coded.flatten() + blocks.first).to(device)
            self._left = blocks.residual.take(own, coded_rows.to(device), sharing)

    def keep_feedback(self) -> None:
        """Keep what codes miss, of values that lie in no pool."""
        self._left = FeedbackRows(torch.zeros(self.coded.numel() // BLOCK, BLOCK, device=self._device))

    def load(self, values: Tensor) -> None:
        """Bring ``values`` into the rows, and to those with codes add what earlier ones left behind."""
        blocks = values.view(-1, BLOCK)
        if values.dtype == torch.float32:
            torch.index_select(blocks, 0, self._chosen, out=self._rows[:-1])
        else:
            self._rows[:-1] = blocks[self._chosen]
        if self._left is not None:
            feedback, shape = self._left.step(), self.coded.shape
            self.feedback = Feedback(feedback.added.view(shape), feedback.missed.view(shape))
            self.coded += self.feedback.added

    def land(self, values: Tensor) -> None:
        """Bring the rows into ``values``."""
        if values.dtype == torch.float32:
            torch.index_select(self._rows, 0, self._back, out=values.view(-1, BLOCK))
        else:
            values.view(-1, BLOCK).copy_(self._rows[self._back])

    def message(self, *owners: int) -> Tensor:
        """Room for the rows of so many owners on the wire."""
        return torch.empty(*owners, self.width, dtype=torch.uint8, device=self._device)

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of such a room, as views: scales, codes, plain values."""
        codes = self._codes * BLOCK
        scales, coded, plain = message.split([2 * self._codes, codes, 2 * self._plains * BLOCK], -1)
        return (
            scales.view(torch.bfloat16), coded.view(self._wire).unflatten(-1, (self._codes, BLOCK)),
            plain.view(PLAIN).unflatten(-1, (self._plains, BLOCK)),
        )  # fmt: skip


def _numbered(kinds: Tensor) -> Tensor:
    return kinds.cumsum(1) - 1


def _by_owner(chosen: Tensor, numbers: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """The places of the chosen blocks, a row an owner, filled up by repetitions; and which of these are none."""
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
