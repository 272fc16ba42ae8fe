"""The step time of an engine on a network, predicted by the cost model from the engine's own messages.

It reads the pool's slots and the sizes of its topology. No engine is built. No process group is made, except to measure
a collective that was not measured on this network before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.priority_schedule import as_ready, plan_release_order
from imagenet_fast.cost_model.step_simulator import THRESHOLDS, SimMessage, simulated_step_s
from imagenet_fast.sync.all_reduce import piece_bytes
from imagenet_fast.sync.bucketing import HIGH_PRIORITY, BucketChunk, build_chunks
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.topology import Topology


def predict_best(
    engine: Engine, pool: GradientPool, wire: torch.dtype, timing: Timing, network: NetworkProbe, share: float = 1.0
) -> tuple[float, float]:
    """Return the best bucket size in bytes on the wire, and the predicted seconds of a step with it.

    Among sizes within 1 % of the fastest, a planned engine uses the smallest, since it profits from messages that it
    can move. Other engines use the largest, since every launch has a small cost that is not in the model.

    Args:
        engine: The engine's declaration. If it has a bucket size of its own, only that is predicted.
        pool: The pool whose gradients are sent.
        wire: Dtype in which values are sent.
        timing: The course of a step.
        network: The costs of collectives and codecs.
        share: Share of the values that the engine sends.
    """
    choices = thresholds(engine, pool) if engine.bucket_bytes is None else [engine.bucket_bytes]
    seconds = {fuse: predict(engine, pool, wire, fuse, timing, network, share) for fuse in choices}
    near = [fuse for fuse, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())]
    best = min(near) if engine.prioritized else max(near)
    return best, seconds[best]


def predict(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, timing: Timing, network: NetworkProbe,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Return the seconds of a step, predicted by the cost model.

    Args:
        engine: The engine's declaration.
        pool: The pool whose gradients are sent.
        wire: Dtype in which values are sent.
        fuse: Bucket size in bytes on the wire.
        timing: The course of a step.
        network: The costs of collectives and codecs.
        share: Share of the values that the engine sends.
    """
    messages = build_chunks(engine, pool, wire, fuse / share, network)
    sendings = [
        SimMessage(
            replace(message.task, message=share * message.task.message),
            range(message.run[0].index, message.run[-1].index + 1),
            network.link(message.collective), network.codec(wire), message.lane == HIGH_PRIORITY, run,
            f"{message.lane}{message.collective} {message.half}", _abreast(message, pool.topology),
            message.collective if engine.prioritized else "",
        )
        for run, pieces in enumerate(_by_run(messages)) for message in pieces
    ]  # fmt: skip
    return simulated_step_s(sendings, releases_of(engine, messages, timing, network), engine.awaits, timing)


def releases_of(
    engine: Engine, messages: Sequence[BucketChunk], timing: Timing, network: NetworkProbe
) -> list[list[int]]:
    """Return the numbers of the messages launched at each event: every push, then the end of backward.

    A planned engine launches them by plan, any other as soon as it can.
    """
    tasks, times = [message.task for message in messages], [*timing.ready, timing.backward_s]
    if not engine.prioritized:
        return as_ready(tasks, len(times))
    most = max(messages, key=lambda message: message.task.message).collective
    return plan_release_order(tasks, times, network.link(most).s_per_byte)


def thresholds(engine: Engine, pool: GradientPool) -> list[float]:
    """Return the bucket sizes to choose from, in bytes on the wire.

    A plan moves whole pieces, so smaller sizes are of no use to it.
    """
    piece = piece_bytes(pool.topology)
    return [size for size in THRESHOLDS if size >= piece] if engine.prioritized else THRESHOLDS


def _by_run(messages: Sequence[BucketChunk]) -> list[list[BucketChunk]]:
    """Group messages by bucket: ``each`` waits for all pieces of a bucket before it sends the next."""
    return [list(pieces) for _, pieces in groupby(messages, key=lambda message: message.run[0])]


def _abreast(message: BucketChunk, topology: Topology) -> int:
    """Return how many messages like this one can be in flight in their lane at a time.

    Each phase adds to that: a stream runs one operation at a time, gloo two per process group. A butterfly keeps its
    thread until it is done.
    """
    if message.collective == "butterfly":
        return 1
    phases = 1 if message.half is not None or message.collective in ("native", "ring") else 2
    return phases * (2 if topology.device.type == "cpu" else 1)
