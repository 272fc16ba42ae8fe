"""Several pools of one model, as one synchroniser: each averages its parameters over ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.sync.deferred_update import Update
from imagenet_fast.sync.engine import Stopwatch, SyncStats
from imagenet_fast.sync.gradient_pool import GradientPool


class Pools:
    """What a training loop calls, it asks of all ``pools``; of decisions, those of the last are reported.

    Ranks call it alike, so their collectives come in one order: that of the pools. ``largest`` takes the largest of a
    value's, in place, over all the ranks that train parts of the same model; ``spent`` tells what else they have sent
    each other since it was asked last.
    """

    def __init__(
        self, pools: Sequence[GradientPool], largest: Callable[[Tensor], Tensor], spent: Callable[[], SyncStats]
    ) -> None:
        self._pools = pools
        self._largest = largest
        self._spent = spent
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

    def set_loss_scale(self, scale: Tensor) -> None:
        """See :meth:`GradientPool.set_loss_scale`."""
        for pool in self._pools:
            pool.set_loss_scale(scale)

    def end_backward(self) -> SyncStats:
        """End the step's last backward."""
        stats = [self._spent(), *(pool.end_backward() for pool in self._pools)]
        found = [pool.found_inf for pool in self._pools if pool.found_inf is not None]
        self.found_inf = self._largest(torch.stack(found).amax(0)) if found else None
        exposed = Stopwatch(self._pools[0].buffer.device)
        exposed.blocks = [block for one in stats if one.exposed is not None for block in one.exposed.blocks]
        return SyncStats(exposed, [transfer for one in stats for transfer in one.transfers], stats[-1].decision)

    def update(self, apply: Update) -> None:
        """See :meth:`GradientPool.update`; ``apply`` is called for each pool.

        It may ask other ranks for norms: also an engine that defers comes to each layer in the order of forward, the
        same on all ranks.
        """
        for pool in self._pools:
            pool.update(apply)

    def settle(self) -> None:
        """Carry out every update that an engine has put off."""
        for pool in self._pools:
            pool.settle()

    def state_dict(self) -> list[dict[str, Any]]:
        """See :meth:`GradientPool.state_dict`, of each pool."""
        return [pool.state_dict() for pool in self._pools]

    def load_state_dict(self, state: list[dict[str, Any]] | dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value, or from one of all parameters, of which each pool takes its own."""
        states = state if isinstance(state, list) else [state] * len(self._pools)
        for pool, own in zip(self._pools, states, strict=True):
            pool.load_state_dict(own)

    def close(self) -> None:
        """End the engines."""
        for pool in self._pools:
            pool.close()
