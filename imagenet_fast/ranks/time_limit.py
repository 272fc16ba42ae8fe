"""How long an operation of a process group may take."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

# Public since torch 2.15, and the old name deprecated.
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)

SLACK_S = 30.0
"""How much longer than a rank may stand still. Who does so too long is named by a thread of its own; the limit of a
backend, which names nobody, is there for when that thread waits for a store whose machine is gone."""


def limit_groups(seconds: float) -> None:
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
