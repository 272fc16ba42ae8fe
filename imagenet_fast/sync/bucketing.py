"""Buckets and messages: how an engine's declaration divides the gradients of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from imagenet_fast.cost_model.priority_schedule import Task
from imagenet_fast.recipe.engine_table import Collective
from imagenet_fast.sync.all_reduce import cost_of, piece_elements, usual_collective
from imagenet_fast.sync.comm_ops import lane_of
from imagenet_fast.sync.engine import Bucket, Engine
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot

HIGH_PRIORITY = "urgent "
"""The lane of the message that is ready last and needed first. It queues behind no other message."""


@dataclass(frozen=True)
class BucketChunk:
    """One message: a piece of a bucket, or one half of that piece's all-reduce."""

    run: Bucket
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


def build_chunks(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, network: NetworkProbe
) -> list[BucketChunk]:
    """Build the messages of a step, in the order in which their gradients are ready.

    Args:
        engine: The declaration.
        pool: The pool whose slots are divided.
        wire: The dtype in which values are sent.
        fuse: Bytes on the wire at which a bucket is full.
        network: Measures the network where the engine chooses a collective by it.
    """
    messages: list[BucketChunk] = []
    elements = -(-piece_elements(wire, pool.topology) // pool.line) * pool.line
    for run in _runs(pool.spans, engine, fuse / wire.itemsize):
        collective = _collective(engine, run, pool, wire, network)
        cost = cost_of(collective, pool.topology, engine.servers)
        for piece, (part, travelling) in enumerate(_parts(run, engine, elements)):
            whose = [s for s in run if s.start < part.stop and part.start < s.stop] if engine.prioritized else run
            closes = len(pool.spans) if engine.awaits == "each" else whose[-1].index
            needed = -whose[-1].index  # the next forward reads the pool's last layers first
            urgent = engine.prioritized and whose[-1] is pool.spans[-1]
            lane = HIGH_PRIORITY if urgent else lane_of(piece, pool.topology.device)
            size = cost * travelling * wire.itemsize
            if not engine.split_reduce_scatter:
                messages.append(BucketChunk(whose, part, collective, None, lane, Task(closes, size, (0, needed))))
                continue
            for half in (0, 1):
                task = Task(closes, size / 2, (half, needed), len(messages) - 1 if half else None)
                messages.append(BucketChunk(whose, part, collective, half, lane, task))
    return messages


def _parts(run: Bucket, engine: Engine, elements: int) -> list[tuple[slice, int]]:
    """Return a bucket's pieces, each with the number of values sent for it; a compressed bucket is one piece."""
    start, stop = run[0].start, run[-1].stop
    if engine.compressor is not None:
        return [(slice(start, stop), sum(map(engine.compressor.travelling, run)))]
    cuts = [*range(start, stop, elements), stop]
    return [(slice(*ends), ends[1] - ends[0]) for ends in pairwise(cuts)]


def _runs(spans: Iterable[ParamSlot], engine: Engine, fuse: float) -> list[Bucket]:
    """Group neighbouring slots of one kind into buckets, each closed once it holds ``fuse`` elements."""
    runs: list[list[ParamSlot]] = []
    for span in spans:
        run = runs[-1] if runs else []
        enough = fuse * (engine.first_bucket_scale if len(runs) == 1 else 1)
        if run and engine.group_key(span) == engine.group_key(run[0]) and run[-1].stop - run[0].start < enough:
            run.append(span)
        else:
            runs.append([span])
    return list(runs)


def _collective(
    engine: Engine, run: Bucket, pool: GradientPool, wire: torch.dtype, network: NetworkProbe
) -> Collective:
    match engine.collective:
        case None:
            usual = usual_collective(pool.buffer.dtype, wire, pool.topology)
            return "pairwise" if usual == "native" and engine.split_reduce_scatter else usual
        case str():
            return engine.collective
        case _:
            return engine.collective(run, network)
