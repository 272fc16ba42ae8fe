"""What travels in a step: the messages that an engine's declaration makes of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from imagenet_fast.cost_model.priority_schedule import Task
from imagenet_fast.recipe.sync_config import Collective
from imagenet_fast.sync.collectives import cost_of, piece_elements, usual_collective
from imagenet_fast.sync.collectives.comm_ops import lane_of
from imagenet_fast.sync.engine import Bucket, Engine
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot

HIGH_PRIORITY = "urgent "
"""The lane of what is ready last and needed first: it queues behind nothing."""


@dataclass(frozen=True)
class BucketChunk:
    """A piece of what travels together, or a half of its all-reduce."""

    run: Bucket
    """What it completes: a plan moves pieces singly, so there these are the spans that it has a part of."""
    part: slice
    """Of the pool."""
    collective: Collective
    half: int | None
    """0 or 1; None: both."""
    lane: str
    """Messages of one lane share their channels."""
    task: Task


def build_chunks(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, network: NetworkProbe
) -> list[BucketChunk]:
    """The messages of a step, fused until ``fuse`` bytes, in the order in which their gradients are ready."""
    messages: list[BucketChunk] = []
    elements = -(-piece_elements(wire, pool.topology) // pool.line) * pool.line
    for run in _runs(pool.spans, engine, fuse / wire.itemsize):
        collective = _collective(engine, run, pool, wire, network)
        cost = cost_of(collective, pool.topology, engine.servers)
        for piece, (part, travelling) in enumerate(_parts(run, engine, elements)):
            whose = [s for s in run if s.start < part.stop and part.start < s.stop] if engine.planned else run
            closes = len(pool.spans) if engine.awaits == "each" else whose[-1].index
            needed = -whose[-1].index  # the pool's last layers are the first of the next forward
            urgent = engine.planned and whose[-1] is pool.spans[-1]
            lane = HIGH_PRIORITY if urgent else lane_of(piece, pool.topology.device)
            size = cost * travelling * wire.itemsize
            if not engine.halves:
                messages.append(BucketChunk(whose, part, collective, None, lane, Task(closes, size, (0, needed))))
                continue
            for half in (0, 1):
                task = Task(closes, size / 2, (half, needed), len(messages) - 1 if half else None)
                messages.append(BucketChunk(whose, part, collective, half, lane, task))
    return messages


def _parts(run: Bucket, engine: Engine, elements: int) -> list[tuple[slice, int]]:
    """The pieces of a run, and how many values travel for each; what is compressed is one piece."""
    start, stop = run[0].start, run[-1].stop
    if engine.compressor is not None:
        return [(slice(start, stop), sum(map(engine.compressor.travelling, run)))]
    cuts = [*range(start, stop, elements), stop]
    return [(slice(*ends), ends[1] - ends[0]) for ends in pairwise(cuts)]


def _runs(spans: Iterable[ParamSlot], engine: Engine, fuse: float) -> list[Bucket]:
    """Neighbours of one kind, until they come to ``fuse`` elements."""
    runs: list[list[ParamSlot]] = []
    for span in spans:
        run = runs[-1] if runs else []
        enough = fuse * (engine.first if len(runs) == 1 else 1)
        if run and engine.together(span) == engine.together(run[0]) and run[-1].stop - run[0].start < enough:
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
            return "pairwise" if usual == "native" and engine.halves else usual
        case str():
            return engine.collective
        case _:
            return engine.collective(run, network)
