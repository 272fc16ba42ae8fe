"""Make engines of settings, and attach them to models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.recipe.engine_table import Codes, CodingTable, EngineTable, PoolTable, Wire
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    Sync,
)
from imagenet_fast.sync.auto import Auto, Candidate
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.consistency import compare_engines
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.sync.deferred_update import Update
from imagenet_fast.sync.engine import Engine, SyncEngine, SyncStats
from imagenet_fast.sync.engines import declare, wire_dtype
from imagenet_fast.sync.gradient_pool import GradientPool
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.sync.topology import Topology

EngineSettings = AllReduceSync | RingSync | LazySync | SparseSync | PowerSgdSync | HybridSync | DearSync | AutoSync


class GradientSync(Protocol):
    """The interface between the training loop and a synchroniser: a pool with its engine, or torch's DDP.

    See ``GradientPool`` for the details of each method.
    """

    @property
    def found_inf(self) -> Tensor | None:
        """1 if the last step had an unusable gradient on any rank, else 0; None without ``guard``."""
        ...

    def guard(self, largest: float) -> None:
        """Check every later gradient; one whose magnitude exceeds ``largest`` counts as infinite."""
        ...

    def zero_grad(self) -> None:
        """Start a step."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside the context, as DDP's ``no_sync`` does."""
        ...

    def end_backward(self) -> SyncStats:
        """End the step's last backward, and return what its synchronisation cost this rank."""
        ...

    def update(self, apply: Update) -> None:
        """Have ``apply`` update the parameters, now or before each is read again."""
        ...

    def step(self, optimizer: Optimizer) -> SyncStats:
        """End the step: ``end_backward``, unless it was called, and the optimizer's step on all parameters here."""
        ...

    def settle(self) -> None:
        """Carry out every update that the engine has deferred."""
        ...

    def state_dict(self) -> Any:
        """Return the state that later steps depend on."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue from a value of ``state_dict``."""
        ...

    def close(self) -> None:
        """Release the engine and what it holds."""
        ...


def attach(
    model: nn.Module,
    engine: EngineSettings | DdpSync | Engine,
    steps_per_epoch: int = 1,
    topology: Topology | None = None,
) -> tuple[nn.Module, GradientSync]:
    """Attach a synchroniser to ``model``.

    Args:
        model: The model to train.
        engine: The settings of an engine, of torch's DDP, or an engine of one's own. The same on every rank.
        steps_per_epoch: Converts those settings that are given in epochs.
        topology: Passed to ``GradientPool``. Not used for DDP.

    Returns:
        The module to call in forward, and the synchroniser.

    Raises:
        ValueError: The ranks were given different engines, or the pool refuses the model.
    """
    device = next(model.parameters(), torch.empty(0)).device
    compare_engines(engine, steps_per_epoch, topology.group if topology else None, device)
    if isinstance(engine, DdpSync):
        peer = DdpPeer(model, wire_dtype(engine.wire), engine.bucket_cap_mb, engine.powersgd_rank)
        return peer.module, peer
    pool = GradientPool(model, topology=topology)
    try:
        pool.attach(_build(engine, pool, steps_per_epoch))
    except BaseException:
        pool.close()  # nobody else can, and the parameters would stay in it
        raise
    return model, pool


def build_engine(engine: EngineSettings | Engine, pool: GradientPool, steps_per_epoch: int = 1) -> SyncEngine:
    """Build the engine that a recipe's ``[sync]`` table names, or a custom ``Engine``, for ``pool``.

    Every rank of the pool must call it with the same arguments.

    Args:
        engine: The settings of an engine, or an engine of one's own.
        pool: The pool whose gradients the engine sends. Attach the engine with ``pool.attach``.
        steps_per_epoch: Converts those settings that are given in epochs.

    Raises:
        TypeError: These are no settings of an engine for pools.
        ValueError: The ranks gave different arguments. Raised on every rank.
    """
    if isinstance(engine, DdpSync) or not isinstance(engine, EngineTable | Engine):
        raise TypeError(f"{engine!r} is no engine for a pool; give the settings of one, such as LazySync()")
    compare_engines(engine, steps_per_epoch, pool.topology.group, pool.buffer.device)
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
            candidates = _candidates(engine, steps_per_epoch, pool.topology.device)
            return cast(SyncEngine, Auto(pool, declare(meanwhile), candidates))
        case _:
            return Scheduler(declare(engine), pool)


def _candidates(chooser: AutoSync, steps_per_epoch: int, device: torch.device) -> list[Candidate]:
    """Return every engine with its default settings, for ``auto`` to predict.

    Only this package's engines may be chosen, and inexact ones only where ``chooser`` allows them. Engines that defer
    are left out where ``chooser`` does not allow them. On GPUs with a 16-bit wire dtype there is also ``lazy`` with the
    backend's own all-reduce, which knows how the GPUs are wired. Its sums are made in the wire dtype.
    """
    candidates = []
    if device.type == "cuda" and chooser.wire in ("bf16", "fp16"):
        native = LazySync(wire=chooser.wire, collective="native")
        candidates.append(Candidate("lazy native", declare(native), native.exact))
    for table in get_args(get_args(Sync)[0]):
        coding = {"bf16_steps": chooser.bf16_steps} if issubclass(table, CodingTable) else {}
        for wire in () if table.chooses else _wires(chooser, table):
            settings = table.model_validate({"wire": wire, **coding}).derived(chooser.dense_epochs or 0.0)
            if settings.defers and not chooser.defers:
                continue
            name = settings.kind if wire == chooser.wire else f"{settings.kind} {wire}"
            engine = declare(settings)
            # The cost model leaves out the compute time of a compressor.
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
    """Return the wire dtypes to predict: the configured one, and 8-bit ones where results may be inexact."""
    codes = get_args(Codes) if chooser.inexact else ()
    allowed = get_args(table.model_fields["wire"].annotation)
    return [wire for wire in dict.fromkeys([chooser.wire, *codes]) if wire in allowed]
