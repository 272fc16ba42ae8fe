"""Buckets and messages: how an engine's declaration divides a model's gradients. Without torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar, get_args

from imagenet_fast.cost_model.collectives import (
    BLOCK,
    RankLayout,
    WireFormat,
    cost_of,
    piece_elements,
    usual_collective,
)
from imagenet_fast.cost_model.priority_schedule import Task
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.sync_config import in_factors, matrix_of
from imagenet_fast.recipe.sync_table import Awaits, Codes, Collective, Wire

HIGH_PRIORITY = "urgent "
"""The lane of the message that is ready last and needed first. It queues behind no other message."""


class Slot(Protocol):
    """The place of one parameter's gradient, in the order in which gradients are ready."""

    @property
    def index(self) -> int:
        """Number in that order."""

    @property
    def start(self) -> int:
        """The first element."""

    @property
    def stop(self) -> int:
        """The element behind the last one and its padding."""

    @property
    def layer(self) -> str:
        """Name of the parameter's layer."""

    @property
    def connected(self) -> bool:
        """Whether the layer is fully connected: it has a matrix as its weight."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the parameter."""


S = TypeVar("S", bound=Slot)


class Links(ABC):
    """The costs of collectives on a network."""

    layout: RankLayout
    """The ranks."""

    @abstractmethod
    def link(self, collective: Collective) -> LinkModel:
        """Return the cost of a message, in bytes of a ring."""

    def seconds(self, collective: Collective, message: float, servers: int = 1) -> float:
        """Return the seconds of an all-reduce of ``message`` bytes, alone on the wire, by so many ``servers``."""
        return self.link(collective).seconds(message * cost_of(collective, self.layout, servers))


def alike(slot: Slot) -> None:
    """Return the same kind for every slot, so that any neighbours may share a bucket."""


@dataclass(frozen=True)
class Declaration:
    """The declaration of an engine: which gradients form a bucket, how and when it is sent, and when it is awaited.

    ``imagenet_fast.sync.bucket_scheduler.Scheduler`` carries it out.
    """

    wire: Wire
    """The dtype in which gradients are sent."""
    awaits: Awaits
    """The point at which messages are waited for.

    - ``each``: messages are sent after backward, and each is waited for before the next is sent.
    - ``backward``: messages are sent during backward and waited for at its end.
    - ``read``: a layer's messages are waited for just before the next forward reads the layer.
    """
    bucket_bytes: float | None = None
    """Bytes on the wire at which a bucket is full; None: the cost model chooses, once steps have been timed."""
    first_bucket_scale: float = 1.0
    """The share of ``bucket_bytes`` at which the first bucket is full."""
    group_key: Callable[[Any], Hashable] = alike
    """The kind of a slot. Only neighbours of one kind share a bucket."""
    collective: Collective | Callable[[Sequence[Any], Links], Collective] | None = None
    """The collective, or a function that chooses one for a bucket; None: ``usual_collective``."""
    servers: int = 1
    """The number of servers over which a parameter server is sharded."""
    prioritized: bool = False
    """True if messages are launched by a plan, most urgent first, once steps have been timed; else at once."""
    plain_steps: int = 0
    """The number of first steps that PowerSGD sends whole."""
    split_reduce_scatter: bool = False
    """True if the second half of an all-reduce is a message of its own, launched later.

    With PowerSGD, the second half is the second factor.
    """
    powersgd_rank: int = 0
    """The rank of PowerSGD's factors, which are sent for a bucket; 0: the gradients as they are, cut into pieces."""
    whole_buckets: bool = False
    """True if a long bucket is one message, and not cut into pieces that overlap."""

    def __post_init__(self) -> None:
        """Refuse what no scheduler can carry out.

        Raises:
            ValueError: ``wire`` or ``awaits`` is unknown, or goes with no plan or no factors.
        """
        for key, known in (("wire", Wire), ("awaits", Awaits)):
            if (given := getattr(self, key)) not in get_args(known):
                *names, last = (f'"{name}"' for name in get_args(known))
                raise ValueError(f'{key} is "{given}"; give {", ".join(names)} or {last}')
        if self.awaits == "each" and self.prioritized:
            raise ValueError(
                'awaits="each" sends one bucket after the other, so there is nothing to plan; leave prioritized out or '
                'take awaits="backward"'
            )
        if self.powersgd_rank and self.wire in get_args(Codes):
            raise ValueError(
                f"PowerSGD's factors cannot be sent as {self.wire}; take a wire of at least 16 bits, or leave "
                "powersgd_rank out"
            )

    @property
    def learns(self) -> bool:
        """True if the engine needs some timed steps and a measured network."""
        return self.prioritized or self.bucket_bytes is None


@dataclass(frozen=True)
class BucketChunk(Generic[S]):
    """One message: a piece of a bucket, or one half of that piece's all-reduce."""

    bucket: Sequence[S]
    """The bucket that the piece belongs to.

    For a planned engine, only the slots that the piece overlaps, since a plan launches pieces one by one.
    """
    part: slice
    """The piece's elements in the pool."""
    collective: Collective
    half: int | None
    """0 or 1 for one half of the all-reduce; None for both."""
    lane: str
    """The message's lane. Messages of one lane share their ``CommStream`` objects."""
    task: Task
    """The message's entry for the release plan."""


def divide(
    engine: Declaration, slots: Sequence[S], alignment: int, layout: RankLayout, wire: WireFormat, fuse: float,
    links: Links,
) -> list[BucketChunk[S]]:  # fmt: skip
    """Build the messages of a step, in the order in which their gradients are ready.

    Args:
        engine: The declaration.
        slots: The slots, in pool order.
        alignment: Elements of which the bounds of slots are multiples.
        layout: The ranks.
        wire: The form in which values are sent.
        fuse: Bytes on the wire at which a bucket is full.
        links: Costs of collectives, where the engine chooses a collective by them.
    """
    messages: list[BucketChunk[S]] = []
    elements = -(-piece_elements(layout, wire) // alignment) * alignment
    for bucket in _buckets(slots, engine, fuse / wire.itemsize):
        collective = _collective(engine, bucket, layout, wire, links)
        cost = cost_of(collective, layout, engine.servers)
        for piece, (part, values_sent) in enumerate(_parts(bucket, engine, elements, layout, wire)):
            whose = [s for s in bucket if s.start < part.stop and part.start < s.stop] if engine.prioritized else bucket
            closes = len(slots) if engine.awaits == "each" else whose[-1].index
            needed = -whose[-1].index  # the next forward reads the pool's last layers first
            urgent = engine.prioritized and whose[-1] is slots[-1]
            lane = HIGH_PRIORITY if urgent else lane_of(piece, layout.on_gpu)
            size = cost * values_sent * wire.itemsize
            if not engine.split_reduce_scatter:
                messages.append(BucketChunk(whose, part, collective, None, lane, Task(closes, size, (0, needed))))
                continue
            for half in (0, 1):
                task = Task(closes, size / 2, (half, needed), len(messages) - 1 if half else None)
                messages.append(BucketChunk(whose, part, collective, half, lane, task))
    return messages


def lane_of(piece: int, on_gpu: bool) -> str:
    """Return the lane of a long message's piece number ``piece``.

    gloo runs two operations of a process group at a time, and both may be waiting for a rank that is behind. So on a
    CPU pieces alternate between two lanes, which saves 3 % of ``dear``'s step.
    """
    return "second " if piece % 2 and not on_gpu else ""


def places_in_pool(elements: Iterable[int], alignment: int) -> Iterator[slice]:
    """Yield the place of each parameter's gradient in the pool, given their elements.

    A place has one element more than the parameter, rounded up to a multiple of ``alignment``.
    """
    offset = 0
    for count in elements:
        stop = offset + (count // alignment + 1) * alignment
        yield slice(offset, stop)
        offset = stop


def _parts(
    bucket: Sequence[S], engine: Declaration, elements: int, layout: RankLayout, wire: WireFormat
) -> list[tuple[slice, int]]:
    """Return a bucket's pieces, each with the number of values sent for it; with PowerSGD a bucket is one piece."""
    start, stop = bucket[0].start, bucket[-1].stop
    if rank := engine.powersgd_rank:  # and a value says whether a slot has been used
        return [(slice(start, stop), sum(in_factors(*matrix_of(slot.shape), rank) + 1 for slot in bucket))]
    cuts = [start, stop] if engine.whole_buckets else [*range(start, stop, elements), stop]
    pieces = [slice(*ends) for ends in pairwise(cuts)]
    if wire.coded:
        return [(piece, _coded_values(bucket, piece, layout)) for piece in pieces]
    return [(piece, piece.stop - piece.start) for piece in pieces]


def _coded_values(bucket: Sequence[Slot], piece: slice, layout: RankLayout) -> int:
    """Return the number of values in the blocks of codes that are sent of a piece.

    Blocks without values are left out. The ranks of a node have a part each, whose blocks are divided evenly among the
    nodes, so some blocks are sent twice.
    """
    length, total = (piece.stop - piece.start) // layout.row, 0
    for begin in range(piece.start, piece.stop, length):
        ends = ((max(s.start, begin), min(s.start + math.prod(s.shape) + 1, begin + length)) for s in bucket)
        blocks = sum(-(-max(0, stop - start) // BLOCK) for start, stop in ends)
        total += -(-blocks // layout.column) * layout.column
    return total * BLOCK


def _buckets(slots: Iterable[S], engine: Declaration, fuse: float) -> Iterator[list[S]]:
    """Group neighbouring slots of one kind into buckets, each closed once it holds ``fuse`` elements."""
    buckets: list[list[S]] = []
    for slot in slots:
        bucket = buckets[-1] if buckets else []
        enough = fuse * (engine.first_bucket_scale if len(buckets) == 1 else 1)
        if (
            bucket
            and engine.group_key(slot) == engine.group_key(bucket[0])
            and bucket[-1].stop - bucket[0].start < enough
        ):
            bucket.append(slot)
        else:
            buckets.append([slot])
    return iter(buckets)


def _collective(engine: Declaration, bucket: list[S], layout: RankLayout, wire: WireFormat, links: Links) -> Collective:
    usual = usual_collective(layout, wire)
    match engine.collective:
        case None:
            return "pairwise" if usual == "native" and engine.split_reduce_scatter else usual
        case str():
            chosen = engine.collective
        case _:
            chosen = engine.collective(bucket, links)
    adds_no_codes = wire.coded and chosen in ("native", "ring", "butterfly", "parameter_server")
    return usual if adds_no_codes else chosen
