"""The layout of ranks: a mesh of pipeline stages, data-parallel replicas and tensor groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from imagenet_fast.ranks.time_limit import patience, set_timeout
from imagenet_fast.recipe.schema import Parallel


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
    stage: dist.ProcessGroup | None
    """The ranks of one stage: replicas and shards together; None: all ranks are."""


def lay_out(parallel: Parallel, device: torch.device) -> Layout:
    """Make the process groups of this rank, as patient as the one of all ranks. Every rank must call it, of which there
    must be a multiple of ``parallel.ranks``."""
    stages, of_a_stage = parallel.pipeline, dist.get_world_size() // parallel.pipeline
    mesh = init_device_mesh(
        device.type, (stages, of_a_stage // parallel.tensor, parallel.tensor), mesh_dim_names=("pp", "dp", "tp")
    )
    pipeline, data, tensor = (mesh.get_group(axis) for axis in ("pp", "dp", "tp"))
    stage = _neighbours(of_a_stage) if stages > 1 and parallel.tensor > 1 else data if stages > 1 else None
    if (limit := patience(device)) is not None:
        for group in (pipeline, data, tensor, *([stage] if stage is not None else [])):
            set_timeout(limit, group)
    return Layout(pipeline, data, tensor, stage)


def _neighbours(size: int) -> dist.ProcessGroup:
    """This rank's group, where all ranks are divided into groups of ``size`` neighbours."""
    own, _ = dist.new_subgroups(size)
    assert own is not None
    return own
