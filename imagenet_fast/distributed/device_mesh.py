"""Layout of ranks: a mesh of pipeline stages, data-parallel replicas and tensor-parallel groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from imagenet_fast.distributed.process_groups import new_group
from imagenet_fast.recipe.parallel_config import Parallel


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
