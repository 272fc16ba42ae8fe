"""The layout: tensor groups are of neighbours, stages far apart, and each rank is in one group of every axis."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.distributed.groups import build_mesh, group_timeout
from imagenet_fast.parallel.ddp import attach
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.sync import AllReduceSync
from tests.ranks import with_ranks

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[Parallel, list[tuple[int, ...]]]] = {
    "tp2dp2": (Parallel(tensor=2), [(2,), (0, 2), (2, 3)]),
    "tp4": (Parallel(tensor=4), [(2,), (2,), (0, 1, 2, 3)]),
    "pp2tp2": (Parallel(tensor=2, pipeline=2, schedule="gpipe"), [(0, 2), (2,), (2, 3)]),
    "pp4": (Parallel(pipeline=4, schedule="gpipe"), [(0, 1, 2, 3), (2,), (2,)]),
}
"""And the ranks of the third in its pipeline, its replicas and its shards."""


@pytest.mark.parametrize("case", LAYOUTS)
@with_ranks(4)
def test_mesh_has_tensor_innermost(case: str):
    parallel, expected = LAYOUTS[case]
    layout = build_mesh(parallel, CPU)
    axes = (layout.pipeline, layout.data, layout.tensor)
    assert group_timeout(CPU) == timedelta(seconds=60), "of the group of all ranks, as tests make it"
    for group in axes:
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=60)
        sums = torch.ones(1)
        dist.all_reduce(sums, group=group)
        assert sums.item() == dist.get_world_size(group)
    assert dist.get_rank() != 2 or [tuple(dist.get_process_group_ranks(group)) for group in axes] == expected
    _, sync = attach(torch.nn.Linear(2, 2), AllReduceSync())  # engines make groups of their own in between
    dist.barrier()  # else a rank may be gone before another has met it
    sync.close()
    layout.close()
