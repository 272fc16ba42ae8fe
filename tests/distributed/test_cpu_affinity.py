"""A rank keeps to the cores beside its GPU, and has as many decoding threads as cores are its own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.distributed.cpu_affinity import bind_to_numa_node, own_cores, shares
from imagenet_fast.distributed.rank_info import RankInfo
from tests.ranks import run

GPU = torch.device("cuda", 0)


def machine(root: Path, node: str, cores: str) -> Path:
    """What a kernel tells of a GPU at 0000:1b:00.0."""
    for path, text in (
        ("sys/bus/pci/devices/0000:1b:00.0/numa_node", f"{node}\n"),
        ("sys/devices/system/node/node1/cpulist", f"{cores}\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def bound(root: Path) -> tuple[set[int], set[int]]:
    """What the binding tells, and the cores this process then may use."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    with patch.object(torch.cuda, "get_device_properties", lambda _: gpu):
        return bind_to_numa_node(GPU, root), os.sched_getaffinity(0)


def test_a_rank_keeps_to_the_cores_beside_its_gpu(tmp_path: Path):
    last = max(os.sched_getaffinity(0))
    ((told, cores),) = run(1, bound, machine(tmp_path, "1", f"{last},1000-1003"), fresh=True)
    assert told == cores == {last}


@pytest.mark.parametrize(("node", "cores"), [("-1", "0"), ("1", "1000-1003"), ("1", ""), ("2", "0"), ("?", "0")])
def test_no_numa_binding_without_topology(tmp_path: Path, node: str, cores: str):
    allowed = os.sched_getaffinity(0)
    ((told, kept),) = run(1, bound, machine(tmp_path, node, cores))
    assert (told, kept) == (set(), allowed)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([{0, 1, 2, 3}] * 2, [2, 2]),
        ([{0, 1, 2, 3}] * 3, [1, 1, 1]),  # a third of four, each
        ([{0, 1}, {2, 3}], [2, 2]),  # as srun gives them
        ([{0, 1}] * 2 + [{2, 3}] * 2, [1, 1, 1, 1]),  # two NUMA nodes
        ([{0, 1, 2, 3}, {3}], [3, 0]),
    ],
)
def test_a_core_is_divided_among_those_who_may_use_it(allowed: list[set[int]], expected: list[int]):
    assert shares(allowed) == expected


def test_ranks_that_are_bound_apart_have_their_cores_to_themselves():
    assert run(2, _own_cores, False, fresh=True) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
    assert run(2, _own_cores, True, fresh=True) == [1, 1]


def _own_cores(apart: bool) -> int:
    rank = dist.get_rank()
    if apart:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
    return own_cores(RankInfo(rank, 2, rank, 2), dist.distributed_c10d._get_default_store())
