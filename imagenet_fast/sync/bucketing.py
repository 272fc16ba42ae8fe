"""Buckets and messages: how an engine's declaration divides the gradients of a pool."""

from __future__ import annotations

import torch

from imagenet_fast.cost_model import messages
from imagenet_fast.cost_model.messages import HIGH_PRIORITY
from imagenet_fast.sync.all_reduce import format_of
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot

__all__ = ["HIGH_PRIORITY", "BucketChunk", "build_chunks"]

BucketChunk = messages.BucketChunk[ParamSlot]
"""One message: a piece of a bucket, or one half of that piece's all-reduce."""


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
    return messages.divide(
        engine.declaration, pool.spans, pool.line, pool.topology.layout, format_of(wire), fuse, network
    )
