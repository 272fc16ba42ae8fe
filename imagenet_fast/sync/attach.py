"""Attach a synchroniser to a model: a pool with its engine, or torch's DDP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.recipe.sync_config import DdpSync
from imagenet_fast.sync.consistency import compare_engines
from imagenet_fast.sync.ddp import DdpPeer
from imagenet_fast.sync.engine import Engine, SyncStats
from imagenet_fast.sync.engines import wire_dtype
from imagenet_fast.sync.factory import EngineSettings
from imagenet_fast.sync.pending import Update
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.topology import Topology


class GradientSync(Protocol):
    """The interface between the training loop and a synchroniser; see ``GradientPool`` for each method."""

    @property
    def found_inf(self) -> Tensor | None: ...  # noqa: D102

    def guard(self, largest: float) -> None: ...  # noqa: D102

    def zero_grad(self) -> None: ...  # noqa: D102

    def no_sync(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def end_backward(self) -> SyncStats: ...  # noqa: D102

    def finish(self) -> SyncStats: ...  # noqa: D102

    def step(self, *optimizers: Optimizer, then: Sequence[Update] = ()) -> SyncStats: ...  # noqa: D102

    def update(self, apply: Update) -> None: ...  # noqa: D102

    def settle(self) -> None: ...  # noqa: D102

    def state_dict(self) -> Any: ...  # noqa: D102

    def load_state_dict(self, state: Any) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


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
    if isinstance(engine, DdpSync):
        compare_engines(engine, steps_per_epoch, None, next(model.parameters()).device)
        peer = DdpPeer(model, wire_dtype(engine.wire), engine.bucket_cap_mb, engine.powersgd_rank)
        return peer.module, peer
    return model, GradientPool(model, engine, steps_per_epoch=steps_per_epoch, topology=topology)
