"""Gradient synchronisation: the pool, the engines, and the calls a training loop makes of them.

pool = GradientPool(model)
pool.attach(build_engine(LazySync(wire="bf16"), pool))
for images, labels in batches:
    pool.zero_grad()
    loss(model(images), labels).backward()   # gradients leave while backward goes on
    pool.step(optimizer)                     # with the mean over all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, assert_never, get_args

import torch
from torch import Tensor, nn

from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    AutoSync,
    Codes,
    CodingTable,
    DdpSync,
    DearSync,
    EngineTable,
    HybridSync,
    LazySync,
    PoolTable,
    PowerSgdSync,
    RingSync,
    SparseSync,
    Sync,
    Wire,
    chosen_collective,
)
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.compression.powersgd import PowerSGD
from imagenet_fast.sync.consistency import compare_engines
from imagenet_fast.sync.deferred_update import Update
from imagenet_fast.sync.engine import Engine, SyncEngine, SyncStats
from imagenet_fast.sync.engines import allreduce, ddp, dear, hybrid, lazy, ring, sparse
from imagenet_fast.sync.engines.auto import Auto, Candidate
from imagenet_fast.sync.engines.ddp import DdpPeer
from imagenet_fast.sync.engines.sparse import Sparse
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology

__all__ = [
    "AllReduceSync",
    "AutoSync",
    "DdpSync",
    "DearSync",
    "Engine",
    "EngineSettings",
    "GradientPool",
    "GradientSync",
    "HybridSync",
    "LazySync",
    "ParamSlot",
    "PowerSgdSync",
    "RingSync",
    "SparseSync",
    "SyncEngine",
    "SyncStats",
    "attach",
    "build_engine",
    "declare",
]

EngineSettings = AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync


class GradientSync(Protocol):
    """What the training loop asks of a synchroniser: a pool with its engine, or torch's DDP."""

    @property
    def found_inf(self) -> Tensor | None: ...
    def guard(self, largest: float) -> None: ...
    def set_loss_scale(self, scale: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def end_backward(self) -> SyncStats: ...
    def update(self, apply: Update) -> None: ...
    def settle(self) -> None: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...
    def close(self) -> None: ...


def attach(
    model: nn.Module,
    engine: EngineSettings | DdpSync | Engine,
    steps_per_epoch: int = 1,
    topology: Topology | None = None,
) -> tuple[nn.Module, GradientSync]:
    """Give ``model`` a synchroniser. Returns the module to call in forward, and the synchroniser. ``topology``: of its
    pool, see there."""
    compare_engines(engine, steps_per_epoch, topology.group if topology else None)
    if isinstance(engine, DdpSync):
        peer = DdpPeer(model, wire_dtype(engine.wire), engine.bucket_cap_mb, engine.powersgd_rank)
        return peer.module, peer
    pool = GradientPool(model, topology=topology)
    pool.attach(_build(engine, pool, steps_per_epoch))
    return model, pool


def build_engine(engine: EngineSettings | Engine, pool: GradientPool, steps_per_epoch: int = 1) -> SyncEngine:
    """The engine that a recipe's ``[sync]`` table names, or a declaration of one's own, at work on ``pool``.

    Every rank of the pool calls it with the same, else all raise ValueError.
    """
    compare_engines(engine, steps_per_epoch, pool.topology.group)
    return _build(engine, pool, steps_per_epoch)


def _build(engine: EngineSettings | Engine, pool: GradientPool, steps_per_epoch: int = 1) -> SyncEngine:
    if isinstance(engine, PoolTable):
        pool.topology.max_ctas = engine.max_ctas
    match engine:
        case Engine():
            return Scheduler(engine, pool)
        case SparseSync():
            return Sparse(engine, pool, wire_dtype(engine.wire), steps_per_epoch)
        case PowerSgdSync():
            dense_steps = round((engine.dense_epochs or 0.0) * steps_per_epoch)
            return Scheduler(declare(engine), pool, dense_steps=dense_steps)
        case AutoSync():
            meanwhile = LazySync(wire=engine.wire, bf16_steps=engine.bf16_steps, threshold_mb=1.0)
            return Auto(pool, declare(meanwhile), _candidates(engine, steps_per_epoch, pool.topology.device))
        case _:
            return Scheduler(declare(engine), pool)


def declare(
    settings: AllReduceSync | RingSync | LazySync | HybridSync | DearSync | SparseSync | PowerSgdSync | DdpSync,
) -> Engine:
    """What an engine's settings come to; of those that no scheduler runs, what the cost model takes them for."""
    engine = _declare(settings)
    return replace(engine, bf16_steps=settings.bf16_steps) if isinstance(settings, CodingTable) else engine


def _declare(
    settings: AllReduceSync | RingSync | LazySync | HybridSync | DearSync | SparseSync | PowerSgdSync | DdpSync,
) -> Engine:
    wire = wire_dtype(settings.wire)
    match settings:
        case AllReduceSync():
            return allreduce.allreduce(settings, wire)
        case RingSync():
            return ring.ring(settings, wire)
        case LazySync():
            return lazy.lazy(settings, wire)
        case HybridSync():
            return hybrid.hybrid(settings, wire)
        case DearSync():
            return dear.dear(settings, wire)
        case SparseSync():
            return sparse.likeness(settings, wire)
        case PowerSgdSync():
            return _compressed(declare(_timing_of(settings)), settings)
        case DdpSync():
            return ddp.likeness(settings, wire)
        case _:
            assert_never(settings)


def _timing_of(settings: PowerSgdSync) -> AllReduceSync | LazySync | HybridSync | DearSync:
    """The engine whose messages it compresses."""
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
    """The dtype gradients travel in."""
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


def _candidates(chooser: AutoSync, steps_per_epoch: int, device: torch.device) -> list[Candidate]:
    """Every engine with its usual settings. Those of ours may be chosen, but for ones that defer or are inexact where
    that is not allowed. On GPUs also ``lazy`` by the backend's own all-reduce, which knows how they are wired; its sums
    are in the wire's dtype."""
    candidates = []
    if device.type == "cuda" and chooser.wire in ("bf16", "fp16"):
        native = LazySync(wire=chooser.wire, collective="native")
        candidates.append(Candidate("lazy native", declare(native), native.exact))
    for table in get_args(get_args(Sync)[0]):
        coding = {"bf16_steps": chooser.bf16_steps} if issubclass(table, CodingTable) else {}
        for wire in () if table.chooses else _wires(chooser, table):
            settings = table.model_validate({"wire": wire, **coding}).warmed_up(chooser.dense_epochs or 0.0)
            if settings.defers and not chooser.defers:
                continue
            name = settings.kind if wire == chooser.wire else f"{settings.kind} {wire}"
            engine = declare(settings)
            # What a compressor's own work costs is not in the model.
            electable = settings.ours and (settings.exact or chooser.keeps) and engine.compressor is None
            build: Callable[[GradientPool], SyncEngine] | None = None
            if isinstance(settings, SparseSync):
                settings = settings.model_copy(update={"max_ctas": chooser.max_ctas})
                build = partial(_build, settings, steps_per_epoch=steps_per_epoch)
            candidates.append(
                Candidate(name, engine, settings.exact, settings.share, electable, settings.share < 1, build)
            )
    return candidates


def _wires(chooser: AutoSync, table: type[EngineTable]) -> list[Wire]:
    """What an engine's gradients may travel as: as they were asked to, and as codes where results may be inexact."""
    codes = get_args(Codes) if chooser.inexact else ()
    allowed = get_args(table.model_fields["wire"].annotation)
    return [wire for wire in dict.fromkeys([chooser.wire, *codes]) if wire in allowed]
