"""Process groups of some ranks, and how long an operation of theirs may take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Public since torch 2.15, and the old name deprecated.
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)

SLACK_S = 30.0
"""How much longer than a rank may stand still. Who does so too long is named by a thread of its own; the limit of a
backend, which names nobody, is there for when that thread waits for a store whose machine is gone."""


def set_group_timeouts(seconds: float) -> None:
    """From now on operations of every process group of this rank may take so long, and the slack; those under way
    keep their limit."""
    limit = timedelta(seconds=seconds + SLACK_S)
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(limit, group)


def patience(device: torch.device) -> timedelta | None:
    """How long an operation over all ranks may take; None where a backend does not tell."""
    world = dist.group.WORLD
    assert world is not None
    patience = getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
    return patience if isinstance(patience, timedelta) else None


def backend_name(device: torch.device) -> str:
    """What carries out the collectives of all ranks, by torch's class: its "nccl" is another one since 2.15."""
    world = dist.group.WORLD
    assert world is not None
    return type(world._get_backend(device)).__name__


def new_group(
    device: torch.device, ranks: Sequence[int], urgent: bool = False, max_ctas: int | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, which alone need to ask for it; as patient as the one of all ranks. What is
    ``urgent`` goes before other kernels of a GPU, and takes at most ``max_ctas`` thread blocks."""
    world = dist.group.WORLD
    assert world is not None
    if device.type != "cuda":
        group = dist.new_group(list(ranks), timeout=patience(device), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        dist.barrier(group)  # else who ends it at once cuts off a rank that still connects
        return group
    options, bound = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent), world.bound_device_id
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    world.bound_device_id = None  # else the communicator would be split off the world's, for which all ranks must call
    try:
        group = dist.new_group(
            list(ranks), patience(device), "nccl", pg_options=options, use_local_synchronization=True, device_id=device
        )
    finally:
        world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects all; a first message would only two
    return group
