"""Compressors: what travels instead of gradients. Any engine's messages can be compressed, whatever their timing.

A compressor sees the spans of a message with their shapes, and gives rounds: local work that fills a dense tensor,
which the engine's collective then averages over the ranks. When and by which wire they travel is no matter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from imagenet_fast.sync.collectives import CommOp
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology

Memory = dict[str, dict[str, Tensor]]
"""What a compressor keeps from step to step: tensors by the name of their parameter, and by their own."""


@dataclass(frozen=True)
class Round:
    """A tensor to be averaged over the ranks."""

    fill: Callable[[], object]
    """Local work before it; it may read what the round before has averaged."""
    values: Tensor
    """1-D; its length is a multiple of ``topology.line``."""


@dataclass(frozen=True)
class Compressed:
    """What becomes of neighbouring spans of the pool: made once, done every step."""

    rounds: Sequence[Round]
    land: Callable[[], object]
    """Local work after the rounds, which leaves the same bits in the pool on every rank."""
    drop: Callable[[], object]
    """Bring the memory back to what it was before the last step, all of which has been done."""
    scale: Callable[[Tensor], object]
    """Multiply by a number what earlier steps have left behind. Nothing may be under way."""


class Compressor(Protocol):
    """A part of an engine's declaration. It has no state but the memory that it is given."""

    def travelling(self, span: ParamSlot) -> int:
        """How many values travel for this span."""
        ...

    def rounds(self, spans: Sequence[ParamSlot], pool: Tensor, topology: Topology, memory: Memory) -> Compressed:
        """What carries neighbouring spans of the pool. What is not in ``memory`` yet is put there, and kept there from
        step to step."""
        ...


def phases_by_round(
    rounds: Sequence[Round], land: Callable[[], object], topology: Topology, lane: str,
    average: Callable[[Tensor, str], Sequence[CommOp]],
) -> list[list[CommOp]]:  # fmt: skip
    """What carries them; ``average`` makes the phases of an all-reduce in a lane.

    Later rounds have lanes of their own, for a message's second round is not to hold up the first of those behind it.
    """
    phases: list[list[CommOp]] = []
    for number, one in enumerate(rounds):
        own = f"{lane}round {number} " if number else lane
        phases.append([_locally(one.fill, topology, own + "packing"), *average(one.values, own)])
    phases[-1].append(_locally(land, topology, lane + "unpacking"))
    return phases


def _locally(act: Callable[[], object], topology: Topology, role: str) -> CommOp:
    def start() -> None:
        act()

    return CommOp(topology.channel((), role), start, False)
