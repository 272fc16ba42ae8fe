"""Gradient synchronisation: the pool, the engines, and the calls a training loop makes of them.

pool = GradientPool(model)
pool.attach(build_engine(LazySync(wire="bf16"), pool))
for images, labels in batches:
    pool.zero_grad()
    loss(model(images), labels).backward()   # gradients leave while backward goes on
    pool.finish()                            # from here every rank holds the mean
    pool.update(lambda params: optimizer.step())
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, assert_never

import torch
from torch import nn

from imagenet_fast.recipe.engines import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    RingSync,
    SparseSync,
    Wire,
)
from imagenet_fast.sync.allreduce import AllReduce
from imagenet_fast.sync.auto import Auto
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.sync.dear import dear
from imagenet_fast.sync.deferral import Update
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.hybrid import hybrid
from imagenet_fast.sync.lazy import Lazy
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span
from imagenet_fast.sync.sparse import Sparse

__all__ = [
    "AllReduceSync",
    "AutoSync",
    "DdpSync",
    "DearSync",
    "EngineSettings",
    "GradientPool",
    "GradientSync",
    "HybridSync",
    "LazySync",
    "RingSync",
    "Span",
    "SparseSync",
    "SyncEngine",
    "SyncStats",
    "attach",
    "build_engine",
]

EngineSettings = AllReduceSync | RingSync | LazySync | SparseSync | HybridSync | DearSync | AutoSync

MiB = 2**20


class GradientSync(Protocol):
    """What the training loop asks of a synchroniser: a pool with its engine, or torch's DDP."""

    @property
    def sent(self) -> dict[nn.Parameter, list[slice]] | None: ...
    def zero_grad(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def finish(self) -> SyncStats: ...
    def update(self, apply: Update) -> None: ...
    def settle(self) -> None: ...


def build_engine(settings: EngineSettings, pool: GradientPool, steps_per_epoch: int = 1) -> SyncEngine:
    """The engine a recipe's ``[sync]`` table names, over ``pool``. Needs torch.distributed to be up."""
    wire = wire_dtype(settings.wire)
    match settings:
        case AllReduceSync():
            return AllReduce(pool, wire, settings.collective)
        case RingSync():
            return Lazy(pool, wire, settings.bucket_mb * MiB, "ring")
        case LazySync():
            threshold = None if settings.threshold_mb == "auto" else settings.threshold_mb * MiB
            return Lazy(pool, wire, threshold, None if settings.collective == "auto" else settings.collective)
        case SparseSync():
            return Sparse(
                pool, wire, settings.sparsity, settings.chunk, round((settings.dense_epochs or 0.0) * steps_per_epoch),
                round(settings.ramp_epochs * steps_per_epoch), settings.threshold_mb * MiB,
                None if settings.collective == "auto" else settings.collective,
            )  # fmt: skip
        case HybridSync():
            return hybrid(pool, wire, settings.policy, settings.fuse_mb * MiB)
        case DearSync():
            return dear(pool, wire, settings.bucket_mb * MiB)
        case AutoSync():
            return Auto(pool, settings.wire, wire, settings.defer, partial(build_engine, pool=pool))
        case _:
            assert_never(settings)


def attach(
    model: nn.Module, settings: EngineSettings | DdpSync, steps_per_epoch: int = 1
) -> tuple[nn.Module, GradientSync]:
    """Give ``model`` a synchroniser. Returns the module to call in forward, and the synchroniser."""
    if isinstance(settings, DdpSync):
        peer = DdpPeer(model, wire_dtype(settings.wire), settings.bucket_cap_mb, settings.powersgd_rank)
        return peer.module, peer
    pool = GradientPool(model)
    pool.attach(build_engine(settings, pool, steps_per_epoch))
    return model, pool


def wire_dtype(wire: Wire) -> torch.dtype:
    """The dtype gradients travel in."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
