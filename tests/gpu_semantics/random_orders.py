"""Carry out a recording of streams' operations again, in a random order that their waits allow.

Memory is filled with garbage when it is allocated and when it is freed. Where streams wait for all they must, every
order ends with the same bits. It finds what a detector overlooks, if that misses what an operation reads or writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_semantics.race_detector import HOST, Moment

GARBAGE = 0xC3  # -391 in fp32, and so in bf16; -195 in int8's neighbour


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    on_gpu: bool


Act = Callable[["_Memory"], str]
"""Does an operation in a memory. Returns what is wrong, or ""."""


class Recording:
    """What a GPU was asked to do."""

    def __init__(self) -> None:
        self._acts: list[tuple[Moment, Act]] = []
        self._freed: list[int] = []
        """Since the last allocation, by the numbers that we give blocks: addresses come again."""
        self._numbers: dict[int, int] = {}
        self._streams: dict[int, int] = {}

    def allocate(self, at: Moment, block: int, size: int, values: UntypedStorage | None) -> None:
        """A block that holds garbage, or ``values`` from the beginning."""
        number = self._numbers[block] = len(self._streams)
        self._streams[number] = at.stream
        gone = [freed for freed in self._freed if self._streams[freed] == at.stream]
        self._freed = [freed for freed in self._freed if self._streams[freed] != at.stream]

        def act(memory: _Memory) -> str:
            for freed in gone:
                memory.spoil(freed)
            memory.add(number, size, values)
            return ""

        self._acts.append((at, act))

    def free(self, block: int) -> None:
        number = self._numbers.pop(block)
        if self._streams[number] != HOST:  # of pinned memory the allocator knows by itself who uses it
            self._freed.append(number)

    def add(self, at: Moment, func: Any, args: Any, kwargs: Any, results: Sequence[Place]) -> None:
        """An operation of torch's. Tensors among its arguments are told as places; ``results`` are its new ones."""
        args, kwargs, results = tree_map(self._numbered, (args, kwargs, list(results)))

        def act(memory: _Memory) -> str:
            with torch.no_grad():
                result = func(*tree_map(memory.found, args), **tree_map(memory.found, kwargs))
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and not memory.holds(x)]
            for place, x in zip(results, made, strict=True):
                memory.found(place).copy_(x)
            return ""

        self._acts.append((at, act))

    def add_transfer(
        self, at: Moment, reads: Sequence[tuple[Place, Tensor]], writes: Sequence[tuple[Place, Tensor]]
    ) -> None:
        """What leaves for others, the host or other ranks, with the values that it had; and what came from them."""
        reads = [(self._numbered(place), values) for place, values in reads]
        writes = [(self._numbered(place), values) for place, values in writes]

        def act(memory: _Memory) -> str:
            other = any(not _same_bits(memory.found(place), values) for place, values in reads)
            for place, values in writes:
                memory.found(place).copy_(values)
            return f"operation {at.number} reads other values" if other else ""

        self._acts.append((at, act))

    def repeat(self, seed: int) -> str:
        """Do it all in a random order. Returns what is wrong first, or ""."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self._repeat(random.Random(seed))

    def _repeat(self, chance: random.Random) -> str:
        memory = _Memory()
        waiting: dict[int, list[tuple[Moment, Act]]] = {}
        for at, act in reversed(self._acts):
            waiting.setdefault(at.stream, []).append((at, act))
        while waiting:
            ready = [s for s, acts in waiting.items() if _is_due(acts[-1][0], waiting)]
            stream = chance.choice(ready)
            # Some in a row, so that one stream runs far ahead of others.
            for _ in range(chance.choice((1, 3, 30, 300))):
                _, act = waiting[stream].pop()
                if wrong := act(memory):
                    return wrong
                if not waiting[stream]:
                    del waiting[stream]
                    break
                if not _is_due(waiting[stream][-1][0], waiting):
                    break
        return ""

    def _numbered(self, x: Any) -> Any:
        if isinstance(x, Place):
            return replace(x, block=self._numbers[x.block])
        return x


def _is_due(at: Moment, waiting: dict[int, list[tuple[Moment, Act]]]) -> bool:
    """Whether all that happens before has been done."""
    return all(acts[-1][0].number > at.before[stream] for stream, acts in waiting.items() if stream != at.stream)


class _Memory:
    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}
        self._held: set[int] = set()

    def add(self, number: int, size: int, values: UntypedStorage | None) -> None:
        block = torch.full((max(1, size),), GARBAGE, dtype=torch.uint8)
        if values is not None:
            block.untyped_storage().copy_(values)
        self._blocks[number] = block
        self._held.add(block.untyped_storage()._cdata)

    def spoil(self, number: int) -> None:
        self._blocks[number].fill_(GARBAGE)

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._held

    def found(self, x: Any) -> Any:
        if not isinstance(x, Place):
            return x
        storage = self._blocks[x.block].untyped_storage()
        return torch.empty(0, dtype=x.dtype).set_(storage, x.offset, x.shape, x.strides)


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (ours, theirs)))
