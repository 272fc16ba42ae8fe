"""Gradient synchronisation: the gradient pool, the engines, and the calls of a training loop.

Example::

    pool = GradientPool(model, LazySync(wire="bf16"))
    for images, labels in batches:
        pool.zero_grad()
        loss(model(images), labels).backward()   # gradients are sent during backward
        pool.step(optimizer)                     # applies the mean over all ranks
"""

from __future__ import annotations

from imagenet_fast.cost_model.declarations import declare
from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    EngineSettings,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
)
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.pool import GradientPool

__all__ = [
    "AllReduceSync",
    "AutoSync",
    "DdpSync",
    "DearSync",
    "Declaration",
    "EngineSettings",
    "GradientPool",
    "HybridSync",
    "LazySync",
    "ParamSlot",
    "PowerSgdSync",
    "RingSync",
    "SparseSync",
    "SyncEngine",
    "SyncStats",
    "declare",
]
