"""Compressors: what is sent instead of gradients, for the messages of any engine, whatever their timing.

A compressor gets the slots of a message with their shapes and returns rounds. A round is local work that fills a dense
tensor, which the engine's collective then averages over the ranks. The compressor decides neither when the tensor is
sent nor by which wire dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from imagenet_fast.sync.comm_ops import CommOp
from imagenet_fast.sync.kept_state import Kept
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology


@dataclass(frozen=True)
class Round:
    """A tensor to be averaged over the ranks."""

    fill: Callable[[], None]
    """Local work before it, which may read what the round before has averaged."""
    values: Tensor
    """1-D; its length is a multiple of ``topology.size``."""


@dataclass(frozen=True)
class Compressed:
    """The compression of neighbouring slots of the pool: built once, run every step."""

    rounds: Sequence[Round]
    land: Callable[[], None]
    """Local work after the rounds, which leaves the same bits in the pool on every rank."""


class Compressor(Protocol):
    """A compressor, as a part of an engine's declaration. Its only state is the memory passed to it."""

    def values_sent(self, slot: ParamSlot) -> int:
        """Return how many values are sent for this slot."""
        ...

    def rounds(self, slots: Sequence[ParamSlot], pool: Tensor, topology: Topology, memory: Kept) -> Compressed:
        """Build the compression of neighbouring slots of the pool.

        Tensors that ``memory`` lacks are created there, and kept there from step to step.
        """
        ...


def phases_by_round(
    rounds: Sequence[Round], land: Callable[[], None], topology: Topology, lane: str,
    average: Callable[[Tensor, str], Sequence[CommOp]],
) -> list[list[CommOp]]:  # fmt: skip
    """Build the phases of each round; ``average`` builds those of an all-reduce in a lane.

    Later rounds have their own lanes, so that a message's second round does not hold up the first round of those behind
    it.
    """
    phases: list[list[CommOp]] = []
    for number, one in enumerate(rounds):
        own = f"{lane}round {number} " if number else lane
        phases.append([CommOp(topology.stream((), own + "packing"), one.fill, False), *average(one.values, own)])
    phases[-1].append(CommOp(topology.stream((), lane + "unpacking"), land, False))
    return phases
