"""Gradient synchronisation: the pool, the engines, and the calls a training loop makes of them.

pool = GradientPool(model.named_parameters())
pool.attach(build_engine(LazySync(wire="bf16"), pool))
for images, labels in batches:
    pool.zero_grad()
    loss(model(images), labels).backward()   # gradients leave while backward goes on
    pool.finish()                            # from here every rank holds the mean
    optimizer.step()
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, assert_never

import torch
from torch import nn

from imagenet_fast.recipe import AllReduceSync, DdpSync, LazySync, Wire
from imagenet_fast.sync.allreduce import AllReduce
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.lazy import Lazy
from imagenet_fast.sync.pool import GradientPool, Span

__all__ = [
    "GradientPool",
    "GradientSync",
    "LazySync",
    "Span",
    "SyncEngine",
    "SyncStats",
    "attach",
    "build_engine",
]

MiB = 2**20


class GradientSync(Protocol):
    """What the training loop asks of a synchroniser: a pool with its engine, or torch's DDP."""

    def zero_grad(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def finish(self) -> SyncStats: ...


def build_engine(settings: AllReduceSync | LazySync, pool: GradientPool) -> SyncEngine:
    """The engine a recipe's ``[sync]`` table names, over ``pool``. Needs torch.distributed to be up."""
    match settings:
        case AllReduceSync():
            return AllReduce(pool, wire_dtype(settings.wire))
        case LazySync():
            return Lazy(pool, wire_dtype(settings.wire), settings.threshold_mb * MiB)
        case _:
            assert_never(settings)


def attach(model: nn.Module, settings: AllReduceSync | DdpSync | LazySync) -> tuple[nn.Module, GradientSync]:
    """Give ``model`` a synchroniser. Returns the module to call in forward, and the synchroniser."""
    if isinstance(settings, DdpSync):
        peer = DdpPeer(model, wire_dtype(settings.wire), settings.bucket_cap_mb)
        return peer.module, peer
    pool = GradientPool(model.named_parameters())
    pool.attach(build_engine(settings, pool))
    return model, pool


def wire_dtype(wire: Wire) -> torch.dtype:
    """The dtype gradients travel in."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
