"""The layout of ranks: a mesh of pipeline stages, data-parallel replicas and tensor groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from imagenet_fast.distributed.process_groups import new_group
from imagenet_fast.recipe.schema import Parallel


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process group along each axis; of an axis of one rank, a group of one.

    The tensor axis is innermost: its groups are of neighbouring ranks, and lie inside a node whose ranks they divide.
    """

    pipeline: dist.ProcessGroup
    """The same place of every stage, by stage."""
    data: dist.ProcessGroup
    """The ranks that hold what this one does, and see other images."""
    tensor: dist.ProcessGroup
    """The ranks that hold the shards of one layer, by shard."""
    stage: dist.ProcessGroup | None
    """The ranks of one stage: replicas and shards together; None: all ranks are."""


def build_mesh(parallel: Parallel, device: torch.device) -> ProcessGroups:
    """Make the process groups of this rank, as patient as the one of all ranks. Every rank must call it, of which there
    must be a multiple of ``parallel.ranks``."""
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
