"""Process groups of some of the ranks, the mesh of a layout's axes, time limits and records of their operations."""

from __future__ import annotations

import atexit
import os
import pickle
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imagenet_fast.recipe.parallel_config import Parallel


def _order_kernels() -> None:
    """Have NCCL start kernels in the order of our calls, or warn that it is too late.

    Several communicators run at once, and else kernels of two ranks may wait for each other. NCCL reads this with the
    first collective of a process, so it is set where our code is imported, also for loops of users. It costs overlap,
    which we could not measure yet: a kernel waits until the one that was called before it has started, also if that is
    an exchange of a layout. 0 in the environment turns it off.
    """
    if "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ:
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        groups: Any = [g for g in dist.distributed_c10d._world.pg_map if "nccl" in dist.get_backend_config(g)]
        if any(group._get_backend(torch.device("cuda"))._get_sequence_number_for_group() for group in groups):
            warnings.warn("import imagenet_fast before NCCL is used, or set NCCL_LAUNCH_ORDER_IMPLICIT=1", stacklevel=2)


_order_kernels()

SLACK_S = 30.0
"""Seconds by which the limit of an operation exceeds the longest limit for a rank without progress.

The watchdog thread names a rank that hangs. A backend's limit names no rank; it takes effect only if that thread waits
for a store whose node is gone.
"""


@cache
def leave_at_exit() -> None:
    """Destroy all process groups when this process ends: gloo's threads must end before the interpreter, or it aborts.

    An abort would make torchrun kill the other ranks, which may still be saving.
    """
    atexit.register(_leave, os.getpid())


def _leave(process: int) -> None:
    if os.getpid() == process and dist.is_initialized():  # a fork has no such threads, and would wait for them
        dist.destroy_process_group()


def group_timeout(device: torch.device) -> timedelta | None:
    """Return the time limit of operations over all ranks, or None if the backend does not report it."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def new_group(
    device: torch.device, ranks: Sequence[int], urgent: bool = False, max_ctas: int | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, with the time limit of the group of all ranks.

    Only the members need to call this.

    Args:
        device: Device of the messages: NCCL for a GPU, else gloo.
        ranks: The members, among them this rank.
        urgent: Whether NCCL's kernels run at high priority, before other kernels of the GPU.
        max_ctas: Maximum number of thread blocks that NCCL uses; None for NCCL's default.
    """
    if device.type != "cuda":
        group = dist.new_group(list(ranks), timeout=group_timeout(device), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        dist.barrier(group)  # else a rank that ends at once would cut off one that is still connecting
        return group
    world = dist.distributed_c10d._get_default_group()
    options, bound = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent), world.bound_device_id
    if (limit := group_timeout(device)) is not None:
        options._timeout = limit  # torch warns of options without it
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    world.bound_device_id = None  # else it is split off the world's communicator, for which all ranks must call
    try:
        group = dist.new_group(
            list(ranks), limit, "nccl", pg_options=options, use_local_synchronization=True, device_id=device
        )
    finally:
        world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects all ranks; a first send only two
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group``, unless all groups have been destroyed since it was made. Nothing may be in flight."""
    if dist.is_initialized():
        with suppress(ValueError):
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process group along each axis; a group of one rank for an axis of size one.

    The tensor axis is innermost: its groups are consecutive ranks. They lie inside a node if their size divides the
    node's number of ranks.
    """

    pipeline: dist.ProcessGroup
    """Ranks at the same place in every stage, ordered by stage."""
    data: dist.ProcessGroup
    """Ranks that hold the same parameters as this one, and train on other images."""
    tensor: dist.ProcessGroup
    """Ranks that hold the shards of one layer, ordered by shard."""
    stage: dist.ProcessGroup | None
    """Ranks of this stage, replicas and shards together; None if that is all ranks."""

    def close(self) -> None:
        """Destroy the groups. Nothing may be in flight."""
        for group in (self.pipeline, self.data, self.tensor, self.stage):
            if group is not None:
                end_group(group)


def build_mesh(parallel: Parallel, device: torch.device) -> ProcessGroups:
    """Make the process groups of this rank, with the time limit of the group of all ranks.

    Every rank must call this. The number of ranks must be a multiple of ``parallel.ranks``.
    """
    size, shards, stages = dist.get_world_size(), parallel.tensor, parallel.pipeline
    of_a_stage = size // stages
    stage, place = divmod(dist.get_rank(), of_a_stage)
    here = range(stage * of_a_stage, (stage + 1) * of_a_stage)
    pipeline = new_group(device, range(place, size, of_a_stage))
    data = new_group(device, here[place % shards :: shards])
    tensor = new_group(device, here[place - place % shards :][:shards])
    if stages == 1:
        return ProcessGroups(pipeline, data, tensor, None)
    return ProcessGroups(pipeline, data, tensor, new_group(device, here) if shards > 1 else data)


def write_flight_record(rank: int, folder: Path | None) -> None:
    """Write NCCL's last operations, which torch records, to ``nccl/rank-R`` in ``folder``, if NCCL is in use.

    ``torchfrtrace`` compares those of all ranks, to show at which operation they diverged. A process that ends itself
    does so before NCCL's own watchdog would write them.
    """
    if folder is None or not torch.cuda.is_available():
        return
    with suppress(OSError, RuntimeError):  # a node that cannot write there leaves no record
        # Before torch 2.15 "nccl" had a record of its own, now it shares that of all others.
        names = ("_dump_nccl_trace", "_dump_fr_trace")
        records: list[bytes] = [getattr(torch._C._distributed_c10d, name)() for name in names]
        used = next((record for record in records if pickle.loads(record).get("entries")), records[0])
        (folder / "nccl").mkdir(parents=True, exist_ok=True)
        (folder / "nccl" / f"rank-{rank}").write_bytes(used)
