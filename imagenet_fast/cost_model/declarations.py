"""Declare engines: what the settings of a recipe's ``[sync]`` table stand for, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import assert_never

from imagenet_fast.cost_model.collectives import wire_format
from imagenet_fast.cost_model.messages import Declaration, Links, Slot, alike
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    engines,
)
from imagenet_fast.recipe.sync_table import Collective, chosen_collective, fusion_bytes

DeclaredSettings = AllReduceSync | RingSync | LazySync | HybridSync | DearSync | SparseSync | PowerSgdSync | DdpSync
"""The settings of engines that a declaration describes, exactly or for the cost model."""


def allreduce(settings: AllReduceSync) -> Declaration:
    """Declare the naive engine, the baseline: one all-reduce per layer after backward, one after another.

    With ``fused`` it is a single all-reduce after backward, as in NVIDIA's submissions to MLPerf
    (``HOROVOD_FUSION_THRESHOLD`` of 64 MB in one group, without overlap).
    """
    return Declaration(
        settings.wire, "each", math.inf, group_key=alike if settings.fused else lambda slot: slot.layer,
        collective=settings.collective, servers=settings.servers, whole_buckets=settings.fused,
    )  # fmt: skip


def ring(settings: RingSync) -> Declaration:
    """Declare the ring: buckets of neighbouring gradients go around a ring of nodes during backward.

    A ring needs the fewest bytes possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009). It is the backend's: gloo's all-reduce always is one; NCCL uses one for long messages, or
    always with ``NCCL_ALGO=ring``.
    """
    return Declaration(settings.wire, "backward", fusion_bytes(settings.bucket_mb), collective="ring")


def lazy(settings: LazySync) -> Declaration:
    """Declare lazy all-reduce: neighbouring gradients are sent together, as soon as enough of them are ready.

    After GradientFlow (arXiv 1902.06855): small messages waste a network on latency. So a finished gradient waits in
    the pool until the bucket of its finished neighbours reaches a threshold. The bucket is then sent as one all-reduce
    while backward continues. The gradients already lie side by side, so fusing them copies nothing. A threshold of 0
    sends each tensor alone, an infinite one sends all at the end of backward.
    """
    return Declaration(
        settings.wire, "backward", fusion_bytes(settings.threshold_mb),
        collective=chosen_collective(settings.collective), servers=settings.servers,
    )  # fmt: skip


def dear(settings: DearSync) -> Declaration:
    """Declare DeAR: reduce-scatter during backward, all-gather during the next forward.

    After Zhang et al., "DeAR: accelerating distributed deep learning with fine-grained all-reduce pipelining" (arXiv
    2302.12445). Both together send an all-reduce's bytes. Scatters are sent before gathers, and gathers in the order in
    which the next forward needs them. Where scatters leave the wire idle, gathers begin before backward has ended.
    """
    fuse = fusion_bytes(settings.bucket_mb)
    return Declaration(settings.wire, "read", fuse, prioritized=True, split_reduce_scatter=True)


def hybrid(settings: HybridSync) -> Declaration:
    """Declare hybrid all-reduce: each layer uses the collective that suits it, overlapped with the next forward too.

    After Kim et al. (KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191). Convolutional layers are small, bound
    by latency and needed first in the next forward. Fully connected layers are large, bound by bandwidth and needed
    last. The former use a butterfly, the latter a ring. Either may use parameter servers instead.

    The policy ``by-type`` is this rule. ``by-size`` fuses layers of all types and uses the collective that is faster
    for that many bytes on this network, which all ranks measure together.
    """
    by_type = settings.policy == "by-type"
    return Declaration(
        settings.wire, "read", fusion_bytes(settings.fuse_mb), group_key=attrgetter("connected") if by_type else alike,
        collective=partial(_suiting if by_type else _faster, settings), servers=settings.servers, prioritized=True,
    )  # fmt: skip


def _suiting(settings: HybridSync, bucket: Sequence[Slot], network: Links) -> Collective:
    return settings.large if bucket[0].connected else settings.small


def _faster(settings: HybridSync, bucket: Sequence[Slot], network: Links) -> Collective:
    message = (bucket[-1].stop - bucket[0].start) * wire_format(settings.wire).itemsize
    return min((settings.small, settings.large), key=lambda name: network.seconds(name, message, settings.servers))


def declare(settings: DeclaredSettings) -> Declaration:
    """Return the ``Declaration`` that the settings stand for.

    ``Scheduler`` does not run sparse engines and DDP: for these, return the approximation that the cost model uses.
    """
    match settings:
        case AllReduceSync():
            return allreduce(settings)
        case RingSync():
            return ring(settings)
        case LazySync():
            return lazy(settings)
        case HybridSync():
            return hybrid(settings)
        case DearSync():
            return dear(settings)
        case SparseSync():  # for the cost model, which also needs the share that is sent
            fuse, collective = fusion_bytes(settings.threshold_mb), chosen_collective(settings.collective)
            return Declaration(settings.wire, settings.awaits, fuse, collective=collective)
        case PowerSgdSync():  # the engine named by ``timing``, but its low-rank factors are sent
            timing = engines()[settings.timing].model_validate({"wire": settings.wire})
            engine = declare(timing)  # type: ignore[arg-type]
            if settings.timing != "allreduce":
                engine = replace(engine, bucket_bytes=fusion_bytes(settings.bucket_mb))
            own = chosen_collective(settings.collective) or engine.collective
            return replace(engine, collective=own, powersgd_rank=settings.rank)
        case DdpSync():
            return _ddp(settings)
        case _:
            assert_never(settings)


def _ddp(settings: DdpSync) -> Declaration:
    """Declare the engine that the cost model uses for DDP.

    DDP counts the bytes of a bucket before a hook's cast. By default its first bucket has 1 MiB.
    """
    cap, first = (settings.bucket_cap_mb, 1.0) if settings.bucket_cap_mb else (25, 1 / 25)
    fuse = cap * 2**20 * wire_format(settings.wire).itemsize / 4
    return Declaration(settings.wire, "backward", fuse, first_bucket_scale=first, collective="native")
