"""The synchroniser of a model: a pool with its engine, or torch's DDP, the peer that the engines are compared with."""

# No `from __future__ import annotations` here: DDP compares a communication hook's annotations with types.

import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from imagenet_fast.distributed.consistency import compare_ranks
from imagenet_fast.parallel.pool_group import PoolGroup
from imagenet_fast.recipe.sync_config import DdpSync
from imagenet_fast.sync import Declaration, EngineSettings, GradientPool, SyncStats
from imagenet_fast.sync.all_reduce import wire_dtype
from imagenet_fast.sync.comm_stream import Transfer
from imagenet_fast.sync.pending import Update
from imagenet_fast.sync.topology import Topology

# Renamed in torch 2.13.
_BUFFER_SWITCH = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class DdpPeer:
    """DDP with its own buckets and overlap, behind the methods that a training loop calls on a ``GradientPool``.

    DDP waits inside ``backward``, where we cannot measure it, so its exposed time is not known. Batch-norm buffers are
    not synchronised here: they are averaged before each evaluation instead.
    """

    def __init__(self, model: nn.Module, wire: torch.dtype, bucket_cap_mb: float | None) -> None:
        """Wrap ``model`` in DDP.

        Args:
            model: The model, on its device.
            wire: Dtype in which gradients are sent; any but bf16 and fp16 sends them as they are.
            bucket_cap_mb: Bucket size in MiB; None: torch's default.
        """
        device = next(model.parameters()).device
        self._nothing = torch.zeros((), device=device)
        self.module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **{_BUFFER_SWITCH: False},  # type: ignore[arg-type]  # its name depends on torch's version
        )
        match wire:
            case torch.bfloat16:
                self._reduce = default_hooks.bf16_compress_hook
            case torch.float16:
                self._reduce = default_hooks.fp16_compress_hook
            case _:
                self._reduce = default_hooks.allreduce_hook
        self._wire = wire
        self._stats = SyncStats(None)
        self._ended: SyncStats | None = None  # the cost of this step, once its last backward has ended
        self._order: list[str] = []  # parameter names in the order of their gradients, in the first step
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._arrivals = [p.register_post_accumulate_grad_hook(partial(self._arrive, name)) for name, p in named]
        self._guard: float | None = None
        self.found_inf: Tensor | None = None
        """1 if a mean of the last step was not finite or was too large, else 0; only set with ``guard``."""
        self.module.register_comm_hook(None, self._send)

    def guard(self, largest: float) -> None:
        """Check the means of every later step; one above ``largest`` counts as infinite."""
        self._guard = largest

    def zero_grad(self) -> None:
        """Start a step: set all gradients to None."""
        self._ended = None
        self.module.zero_grad(set_to_none=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates gradients locally."""
        return self.module.no_sync()

    def end_backward(self) -> SyncStats:
        """Return the step's statistics, and set ``found_inf`` if the means are guarded.

        A second call in a step does nothing.
        """
        if self._ended is not None:
            return self._ended
        for hook in self._arrivals:
            hook.remove()
        self._ended, self._stats = self._stats, SyncStats(None)
        if self._guard is not None:
            means = [p.grad for p in self.module.parameters() if p.grad is not None]
            norms = torch._foreach_norm(means, math.inf) if means else [self._nothing]
            self.found_inf = (~(torch.stack(norms).max() <= self._guard)).float()
        return self._ended

    finish = end_backward  # DDP's backward has left the means in p.grad

    def update(self, apply: Update) -> None:
        """Call ``apply`` with all trainable parameters."""
        apply([p for p in self.module.parameters() if p.requires_grad])

    def step(self, *optimizers: Optimizer, then: Sequence[Update] = ()) -> SyncStats:
        """End the step: ``end_backward``, unless it was called, then each ``optimizer.step()``, and ``then``."""
        stats = self.end_backward()
        for optimizer in optimizers:
            optimizer.step()
        for update in then:
            self.update(update)
        return stats

    def settle(self) -> None:
        """Do nothing: DDP defers no update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the order that DDP derives its buckets from."""
        return {"order": self._order, "engine": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``."""
        if state.get("order"):
            self._trace_shapes(state["order"])

    def _trace_shapes(self, order: list[str]) -> None:
        """Run a backward of zeros that produces gradients in the order of the first step.

        DDP builds its buckets from that order in the next forward, and the buckets decide how sums are rounded.
        """
        parameters = dict(self.module.module.named_parameters())
        self.module.reducer.prepare_for_forward()
        self.module.reducer.prepare_for_backward([])
        with torch.enable_grad():  # autograd starts with the operation that was made last
            nothing = [parameters[name].sum() * 0 for name in reversed(order)]
            torch.stack(nothing).sum().backward()
        self.end_backward()
        self.zero_grad()

    def close(self) -> None:
        """Do nothing: DDP uses the process group of all ranks."""

    def _arrive(self, name: str, param: Tensor) -> None:
        if name in self._order:  # the last backward counts
            self._order.clear()
        self._order.append(name)

    def _send(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket, which DDP waits for by itself, and count its bytes, as in a ring."""
        transfer = Transfer.begin(f"bucket {bucket.index()}", self._nothing.device)
        ranks = dist.get_world_size()
        sent_bytes = 2 * (ranks - 1) * bucket.buffer().numel() * self._wire.itemsize // ranks
        self._stats.count(sent_bytes)
        outcome = self._reduce(dist.distributed_c10d._get_default_group(), bucket)
        if transfer is not None:
            outcome.add_done_callback(lambda _: transfer.end(self._nothing.device, sent_bytes))
        return outcome


GradientSync: TypeAlias = GradientPool | PoolGroup | DdpPeer
"""What a training loop calls; see ``GradientPool`` for each method."""


def attach(
    model: nn.Module,
    engine: EngineSettings | DdpSync | Declaration,
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
        compare_ranks(engine, steps_per_epoch, None, {}, device=next(model.parameters()).device)
        peer = DdpPeer(model, wire_dtype(engine.wire), engine.bucket_cap_mb)
        return peer.module, peer
    return model, GradientPool(model, engine, steps_per_epoch=steps_per_epoch, topology=topology)
