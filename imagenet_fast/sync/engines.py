"""Declare engines: what the settings of a recipe's ``[sync]`` table stand for.

allreduce, ring, lazy, dear and hybrid need no code of their own.

A declaration says what is sent together, when, and by which collective; ``bucket_scheduler`` carries it out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import assert_never

import torch

from imagenet_fast.recipe.engine_table import CodingTable, Collective, Wire, chosen_collective, fusion_bytes
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
)
from imagenet_fast.sync.engine import Bucket, Engine, alike
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.powersgd import PowerSGD

DeclaredSettings = AllReduceSync | RingSync | LazySync | HybridSync | DearSync | SparseSync | PowerSgdSync | DdpSync
"""The settings of engines that a declaration describes, exactly or for the cost model."""


def allreduce(settings: AllReduceSync, wire: torch.dtype) -> Engine:
    """Declare the naive engine, the baseline: one all-reduce per layer after backward, one after another."""
    return Engine(
        wire, "each", bucket_bytes=math.inf, group_key=lambda span: span.layer, collective=settings.collective,
        servers=settings.servers,
    )  # fmt: skip


def ring(settings: RingSync, wire: torch.dtype) -> Engine:
    """Declare the ring: buckets of neighbouring gradients go around a ring of nodes during backward.

    A ring needs the fewest bytes possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009). It is the backend's: gloo's all-reduce always is one; NCCL uses one for long messages, or
    always with ``NCCL_ALGO=ring``.
    """
    return Engine(wire, "backward", fusion_bytes(settings.bucket_mb), collective="ring")


def lazy(settings: LazySync, wire: torch.dtype) -> Engine:
    """Declare lazy all-reduce: neighbouring gradients are sent together, as soon as enough of them are ready.

    After GradientFlow (arXiv 1902.06855): small messages waste a network on latency. So a finished gradient waits in
    the pool until the bucket of its finished neighbours reaches a threshold. The bucket is then sent as one all-reduce
    while backward continues. The gradients already lie side by side, so fusing them copies nothing. A threshold of 0
    sends each tensor alone, an infinite one sends all at the end of backward.
    """
    return Engine(
        wire,
        "backward",
        fusion_bytes(settings.threshold_mb),
        collective=chosen_collective(settings.collective),
        servers=settings.servers,
    )


def dear(settings: DearSync, wire: torch.dtype) -> Engine:
    """Declare DeAR: reduce-scatter during backward, all-gather during the next forward.

    After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining" (arXiv
    2302.12445). Both together send an all-reduce's bytes. Scatters are sent before gathers, and gathers in the order in
    which the next forward needs them. Where scatters leave the wire idle, gathers begin before backward has ended.
    """
    return Engine(wire, "read", fusion_bytes(settings.bucket_mb), prioritized=True, split_reduce_scatter=True)


def hybrid(settings: HybridSync, wire: torch.dtype) -> Engine:
    """Declare hybrid all-reduce: each layer uses the collective that suits it, overlapped with the next forward too.

    After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191). Convolutional layers are small, bound
    by latency and needed first in the next forward. Fully connected layers are large, bound by bandwidth and needed
    last. The former use a butterfly, the latter a ring. Either may use parameter servers instead.

    The policy ``by-type`` is this rule. ``by-size`` fuses layers of all types and uses the collective that is faster
    for that many bytes on this network, which all ranks measure together.
    """
    by_type = settings.policy == "by-type"
    return Engine(
        wire, "read", fusion_bytes(settings.fuse_mb), group_key=is_connected if by_type else alike,
        collective=partial(_suiting if by_type else _faster, settings, wire.itemsize), servers=settings.servers,
        prioritized=True,
    )  # fmt: skip


def is_connected(span: ParamSlot) -> bool:
    """Return whether the slot's layer is fully connected: it has a matrix as its weight.

    The weight of a convolution or a norm is not a matrix.
    """
    assert span.module is not None, "a deferring engine's pool knows its model"
    return any(p.dim() == 2 for p in span.module.parameters(recurse=False))


def _suiting(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    return settings.large if is_connected(run[0]) else settings.small


def _faster(settings: HybridSync, itemsize: int, run: Bucket, network: NetworkProbe) -> Collective:
    message = (run[-1].stop - run[0].start) * itemsize
    return min((settings.small, settings.large), key=lambda name: network.seconds(name, message))


def declare(settings: DeclaredSettings) -> Engine:
    """Return the ``Engine`` that the settings stand for.

    ``Scheduler`` does not run sparse engines and DDP: for these, return the approximation that the cost model uses.
    """
    engine = _declare(settings)
    return replace(engine, bf16_steps=settings.bf16_steps) if isinstance(settings, CodingTable) else engine


def _declare(settings: DeclaredSettings) -> Engine:
    wire = wire_dtype(settings.wire)
    match settings:
        case AllReduceSync():
            return allreduce(settings, wire)
        case RingSync():
            return ring(settings, wire)
        case LazySync():
            return lazy(settings, wire)
        case HybridSync():
            return hybrid(settings, wire)
        case DearSync():
            return dear(settings, wire)
        case SparseSync():
            return _sparse(settings, wire)
        case PowerSgdSync():
            return _compressed(declare(_timing_of(settings)), settings)
        case DdpSync():
            return _ddp(settings, wire)
        case _:
            assert_never(settings)


def _sparse(settings: SparseSync, wire: torch.dtype) -> Engine:
    """Declare the engine that the cost model uses for ``sparse``, which also needs the share that is sent."""
    return Engine(
        wire, settings.awaits, fusion_bytes(settings.threshold_mb), collective=chosen_collective(settings.collective)
    )


def _ddp(settings: DdpSync, wire: torch.dtype) -> Engine:
    """Declare the engine that the cost model uses for DDP.

    DDP counts the bytes of a bucket before a hook's cast. Its first bucket is smaller.
    """
    cap = settings.bucket_cap_mb or 25
    compressor = PowerSGD(settings.powersgd_rank) if settings.powersgd_rank else None
    fuse = cap * 2**20 * wire.itemsize / 4
    return Engine(wire, "backward", fuse, first_bucket_scale=1 / cap, collective="native", compressor=compressor)


def _timing_of(settings: PowerSgdSync) -> AllReduceSync | LazySync | HybridSync | DearSync:
    """Return the settings of the engine whose messages PowerSGD compresses."""
    match settings.timing:
        case "allreduce":
            return AllReduceSync(wire=settings.wire)
        case "lazy":
            return LazySync(wire=settings.wire, threshold_mb=settings.bucket_mb)
        case "hybrid":
            return HybridSync(wire=settings.wire, fuse_mb=settings.bucket_mb)
        case "dear":
            return DearSync(wire=settings.wire, bucket_mb=settings.bucket_mb)


def _compressed(engine: Engine, settings: PowerSgdSync) -> Engine:
    collective = chosen_collective(settings.collective) or engine.collective
    return replace(engine, collective=collective, compressor=PowerSGD(settings.rank))


def wire_dtype(wire: Wire) -> torch.dtype:
    """Return the torch dtype of a wire dtype's name."""
    match wire:
        case "fp32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case "int8":
            return torch.int8
        case "fp8":
            return torch.float8_e4m3fn
        case _:
            assert_never(wire)
