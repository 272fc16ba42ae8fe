"""What a step of an engine would take on a network: the cost model, given the engine's own messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from imagenet_fast.cost.link import Link
from imagenet_fast.cost.simulation import THRESHOLDS, deferred_step, fused_step, serial_step
from imagenet_fast.cost.timing import Timing
from imagenet_fast.sync.collectives import piece_bytes
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.messages import Message, messages_of
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.probing import Network


def best_fuse(engine: Engine, pool: GradientPool, wire: torch.dtype, timing: Timing, network: Network) -> float:
    """The bytes on the wire from which on a run should leave, by the cost model.

    Of those within 1 % of the fastest a plan takes the smallest, since it profits from messages that it can move; else
    it is the largest, since the model leaves out what a launch costs the processor.
    """
    if engine.fuse is not None:
        return engine.fuse
    seconds = {fuse: predict(engine, pool, wire, fuse, timing, network) for fuse in thresholds(engine, pool)}
    near = [fuse for fuse, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())]
    return min(near) if engine.planned else max(near)


def predict(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, timing: Timing, network: Network,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of a step by the cost model, of an engine that sends ``share`` of the values."""
    messages = messages_of(engine, pool, wire, fuse / share, network)
    link = link_of(messages, network)
    runs = [(pieces[0].task.event, share * sum(m.task.message for m in pieces)) for pieces in _by_run(messages)]
    match engine.awaits:
        case "each":
            return serial_step([size for _, size in runs], timing, link)
        case "backward":
            return fused_step(runs, timing, link)
        case "read":
            carried = [range(message.run[0].index, message.run[-1].index + 1) for message in messages]
            return deferred_step([message.task for message in messages], carried, timing, link)


def thresholds(engine: Engine, pool: GradientPool) -> list[float]:
    """What is chosen from; a plan moves whole pieces, so nothing shorter is of use to it."""
    piece = piece_bytes(pool.topology)
    return [size for size in THRESHOLDS if size >= piece] if engine.planned else THRESHOLDS


def link_of(messages: Sequence[Message], network: Network) -> Link:
    """Of the collective that carries most. A single message of it shows our own work beside the wire, which pieces
    overlap, and bytes that ``cost_of`` counts: so the wire is as fast as the faster of it and the backend's."""
    own = network.link(max(messages, key=lambda message: message.task.message).collective)
    return replace(own, s_per_byte=min(own.s_per_byte, network.link("native").s_per_byte))


def _by_run(messages: Sequence[Message]) -> Iterable[list[Message]]:
    return (list(pieces) for _, pieces in groupby(messages, key=lambda message: message.run[0]))
