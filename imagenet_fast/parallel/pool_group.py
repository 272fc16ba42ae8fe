"""Several pools of one model as one synchroniser, and the traffic between ranks that hold parts of the model.

Each pool averages its parameters over ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from imagenet_fast.distributed.device_timer import Stopwatch
from imagenet_fast.sync.comm_stream import Transfer
from imagenet_fast.sync.contract import StepState
from imagenet_fast.sync.engine import SyncStats
from imagenet_fast.sync.pending import Update
from imagenet_fast.sync.pool import GradientPool


class PoolGroup:
    """A synchroniser that forwards every call to several pools, in their order.

    All ranks must make the same calls, so that their collectives run in the same order.
    """

    def __init__(
        self, pools: Sequence[GradientPool], largest: Callable[[Tensor], Tensor], spent: Callable[[], SyncStats],
        end_layout: Callable[[], None],
    ) -> None:  # fmt: skip
        """Combine ``pools``.

        Args:
            pools: The pools, at least one. If ``auto`` chooses an engine, the decision of the last pool is reported.
            largest: Takes the maximum of a tensor, in place, over all ranks that train parts of the same model.
            spent: Returns the cost of the other traffic between these ranks since its last call.
            end_layout: Ends the process groups for that traffic.
        """
        self._pools = pools
        self._largest = largest
        self._spent = spent
        self._end_layout = end_layout
        self._stats: SyncStats | None = None  # the cost of this step, once its last backward has ended
        self.found_inf: Tensor | None = None
        """1 if a gradient of the last step cannot be used on any rank, else 0; None without ``guard``."""

    def guard(self, largest: float) -> None:
        """Check every later gradient, as ``GradientPool.guard`` does."""
        for pool in self._pools:
            pool.guard(largest)

    def zero_grad(self) -> None:
        """Start a step."""
        self._stats = None
        for pool in self._pools:
            pool.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context."""
        with ExitStack() as stack:
            for pool in self._pools:
                stack.enter_context(pool.no_sync())
            yield

    def end_backward(self) -> SyncStats:
        """End the step's last backward, and return the cost of all pools and of the other traffic.

        A second call in a step does nothing.
        """
        if self._stats is not None:
            return self._stats
        stats = [self._spent(), *(pool.end_backward() for pool in self._pools)]
        found = [pool.found_inf for pool in self._pools if pool.found_inf is not None]
        self.found_inf = self._largest(torch.stack(found).amax(0)) if found else None
        watches = [one.exposed for one in stats]
        blocks = [block for watch in watches if watch is not None for block in watch.blocks]
        exposed = None if None in watches else Stopwatch(self._pools[0].topology.device, blocks)
        sent_bytes, launches = sum(one.sent_bytes for one in stats), sum(one.launches for one in stats)
        self._stats = SyncStats(exposed, sent_bytes, launches, stats[-1].decision)
        return self._stats

    def finish(self) -> SyncStats:
        """End the step's last backward, and put the means into ``p.grad`` of all parameters."""
        stats = self.end_backward()
        for pool in self._pools:
            pool.finish()
        return stats

    def update(self, apply: Update) -> None:
        """Have ``apply`` update the parameters of each pool, as ``GradientPool.update`` does.

        ``apply`` may reduce norms over other ranks: even a deferring engine updates layers in the order of forward,
        which is the same on all ranks.
        """
        for pool in self._pools:
            pool.update(apply)

    def step(self, *optimizers: Optimizer, then: Sequence[Update] = ()) -> SyncStats:
        """End the step in every pool, as ``GradientPool.step`` does; each optimizer has the parameters of all."""
        stats = self.end_backward()
        for pool in self._pools:
            pool.step(*optimizers, then=then)
        return stats

    def settle(self) -> None:
        """Carry out every deferred update."""
        for pool in self._pools:
            pool.settle()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each pool, as ``GradientPool.state_dict`` does."""
        return [pool.state_dict() for pool in self._pools]

    def load_state_dict(self, state: list[dict[str, Any]] | dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``, or from one pool's state for all pools.

        Args:
            state: A list with the state of each pool; or the state of a single pool that had all parameters, of which
                each pool takes its own.
        """
        states = state if isinstance(state, list) else [state] * len(self._pools)
        for pool, own in zip(self._pools, states, strict=True):
            pool.load_state_dict(own)

    def close(self) -> None:
        """Close all pools, and end the process groups of the layout unless a step is under way."""
        with ExitStack() as rest:  # which is done too where one of them fails
            if not any(pool.current.state is StepState.SENDING for pool in self._pools):
                rest.callback(self._end_layout)
            for pool in reversed(self._pools):
                rest.callback(pool.close)


class ActivationTraffic:
    """A counter of the activations, and of their gradients, that this rank sends and receives."""

    def __init__(self, device: torch.device) -> None:
        """Create an empty counter for traffic of ``device``."""
        self._device = device
        self._stats = SyncStats(Stopwatch(device))

    @contextmanager
    def waited_for(self, sent_bytes: int) -> Iterator[None]:
        """Count a blocking exchange inside the context, and the time it takes.

        Args:
            sent_bytes: Bytes that this rank sends.
        """
        stopwatch = self._stats.exposed
        assert stopwatch is not None
        transfer = Transfer.begin("activations", self._device)
        with stopwatch("activations"):
            yield
        self.exchanged(sent_bytes)
        if transfer is not None:
            transfer.end(self._device, sent_bytes)

    def exchanged(self, sent_bytes: int) -> None:
        """Count an exchange whose waiting time is not known."""
        self._stats.count(sent_bytes)

    def spent(self) -> SyncStats:
        """Return what has been counted since the last call."""
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._device))
        return stats
