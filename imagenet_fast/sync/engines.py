"""Declare the engines that need no code of their own: allreduce, ring, lazy, dear and hybrid.

A declaration says what is sent together, when, and by which collective; ``bucket_scheduler`` carries it out.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    Collective,
    DearSync,
    HybridSync,
    LazySync,
    RingSync,
    chosen_collective,
    fusion_bytes,
)
from imagenet_fast.sync.engine import Bucket, Engine, alike
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot


def allreduce(settings: AllReduceSync, wire: torch.dtype) -> Engine:
    """Declare the naive engine, the baseline: one all-reduce per layer after backward, one after another."""
    return Engine(
        wire, "each", fuse=math.inf, together=lambda span: span.layer, collective=settings.collective,
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
    return Engine(wire, "read", fusion_bytes(settings.bucket_mb), planned=True, halves=True)


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
        wire, "read", fusion_bytes(settings.fuse_mb), together=is_connected if by_type else alike,
        collective=partial(_suiting if by_type else _faster, settings, wire.itemsize), servers=settings.servers,
        planned=True,
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
