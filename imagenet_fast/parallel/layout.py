"""The layout of ranks: a mesh of pipeline stages, data-parallel replicas and tensor groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from imagenet_fast.recipe.schema import Parallel
from imagenet_fast.sync.channel import patience

# Public since torch 2.15, and the old name deprecated.
_set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)


@dataclass(frozen=True)
class Layout:
    """This rank's process group along each axis; of an axis of one rank, a group of one.

    The tensor axis is innermost: its groups are of neighbouring ranks, and lie inside a node whose ranks they divide.
    """

    pipeline: dist.ProcessGroup
    """The same place of every stage, by stage."""
    data: dist.ProcessGroup
    """The ranks that hold what this one does, and see other pictures."""
    tensor: dist.ProcessGroup
    """The ranks that hold the shards of one layer, by shard."""


def lay_out(parallel: Parallel, device: torch.device) -> Layout:
    """Make the process groups of this rank, as patient as the one of all ranks. Every rank must call it, of which there
    must be a multiple of ``parallel.ranks``."""
    shape = (parallel.pipeline, dist.get_world_size() // parallel.ranks, parallel.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    layout = Layout(*(mesh.get_group(axis) for axis in ("pp", "dp", "tp")))
    if (limit := patience(device)) is not None:
        for group in (layout.pipeline, layout.data, layout.tensor):
            _set_timeout(limit, group)
    return layout
