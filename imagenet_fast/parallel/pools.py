"""Two pools of one model: shards are averaged over the ranks that hold the same ones, all else over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from imagenet_fast.parallel.tensor import TensorGroup
from imagenet_fast.sync import DdpSync, Engine, EngineSettings, GradientPool, SyncStats, build_engine
from imagenet_fast.sync.deferral import Update
from imagenet_fast.sync.engine import Stopwatch


class Pools:
    """Synchronises a model with shards, each pool by an engine of its own: what a training loop calls, it asks of both.

    Ranks call it alike, so they make process groups and measure networks in one order: that of the pools. Raises
    ValueError for torch's DDP, which has one group for all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: EngineSettings | DdpSync | Engine,
        group: TensorGroup,
        steps_per_epoch: int = 1,
    ) -> None:
        if isinstance(engine, DdpSync):
            raise ValueError("torch's DDP averages all parameters over the same ranks; take an engine that has a pool")
        named = list(model.named_parameters())
        shards = [(name, param) for name, param in named if param in group.shards]
        others = [(name, param) for name, param in named if param not in group.shards]
        self._pools = [GradientPool(shards, group.replicas, model=model), GradientPool(others, model=model)]
        for pool in self._pools:
            pool.attach(build_engine(engine, pool, steps_per_epoch))
        self._group = group
        self.found_inf: Tensor | None = None
        """With :meth:`guard`: 1 where a gradient of the last step, on any rank, cannot be used, else 0."""

    def guard(self, largest: float) -> None:
        """See :meth:`GradientPool.guard`."""
        for pool in self._pools:
            pool.guard(largest)

    def zero_grad(self) -> None:
        """Start a step."""
        for pool in self._pools:
            pool.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally."""
        with ExitStack() as stack:
            for pool in self._pools:
                stack.enter_context(pool.no_sync())
            yield

    def finish(self) -> SyncStats:
        """End of the step's last backward. What the step's activations have cost counts as well."""
        stats = [self._group.spent(), *(pool.finish() for pool in self._pools)]
        found = [pool.found_inf for pool in self._pools if pool.found_inf is not None]
        self.found_inf = self._group.largest(torch.stack(found).amax(0)) if found else None
        return _sum_of(stats, self._pools[0].buffer.device)

    def update(self, apply: Update) -> None:
        """See :meth:`GradientPool.update`; ``apply`` is called for each pool.

        It may ask the tensor group for norms: also an engine that defers comes to each layer in the order of forward,
        the same on all ranks.
        """
        for pool in self._pools:
            pool.update(apply)

    def settle(self) -> None:
        """Carry out every update that an engine has put off."""
        for pool in self._pools:
            pool.settle()

    def close(self) -> None:
        """End the engines."""
        for pool in self._pools:
            pool.close()


def _sum_of(stats: list[SyncStats], device: torch.device) -> SyncStats:
    """What several have cost. Of decisions that of the pool of all ranks."""
    exposed = Stopwatch(device)
    exposed.blocks = [block for one in stats if one.exposed is not None for block in one.exposed.blocks]
    return SyncStats(exposed, [transfer for one in stats for transfer in one.transfers], stats[-1].decision)
