"""What of its node a rank may use: the cores beside its GPU, those that are its own, and what cgroups leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from imagenet_fast.distributed.board import call_within
from imagenet_fast.distributed.cores import bind_to_numa_node, usable_cores, usable_memory
from imagenet_fast.distributed.init import own_cores, prepare_device
from imagenet_fast.distributed.join import connecting, meet
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError
from tests.ranks import run, with_ranks

GPU = torch.device("cuda", 0)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with what a kernel tells."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def of_gpu(node: str, cores: str) -> dict[str, str]:
    """What it tells of a GPU at 0000:1b:00.0."""
    place, list_ = "sys/bus/pci/devices/0000:1b:00.0/numa_node", "sys/devices/system/node/node1/cpulist"
    return {place: f"{node}\n", list_: f"{cores}\n"}


@pytest.mark.parametrize("open_files", [partial(prepare_device, 0), partial(meet, None, 1, 9.0)], ids=["rank", "store"])
def test_ranks_and_who_holds_their_store_may_open_as_many_files_as_the_node_lets_them(open_files: Callable[[], Any]):
    """Each of 512 ranks has four connections to the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def bound(root: Path) -> set[int]:
    """The cores that this process may use once it is bound."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    with patch.object(torch.cuda, "get_device_properties", lambda _: gpu):
        bind_to_numa_node(GPU, root)
    return os.sched_getaffinity(0)


def test_a_rank_keeps_to_the_cores_beside_its_gpu(tmp_path: Path):
    last = max(os.sched_getaffinity(0))
    assert run(1, bound, machine(tmp_path, of_gpu("1", f"{last},1000-1003")), fresh=True) == [{last}]


@pytest.mark.parametrize(("node", "cores"), [("-1", "0"), ("1", "1000-1003"), ("1", ""), ("2", "0"), ("?", "0")])
def test_no_numa_binding_without_topology(tmp_path: Path, node: str, cores: str):
    assert run(1, bound, machine(tmp_path, of_gpu(node, cores))) == [os.sched_getaffinity(0)]


@pytest.mark.parametrize("apart", [False, True])
@with_ranks(2, fresh=True)
def test_ranks_that_are_bound_apart_have_their_cores_to_themselves(apart: bool):
    rank, allowed = dist.get_rank(), sorted(os.sched_getaffinity(0))
    if apart:
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
    own = own_cores(RankInfo(rank, 2, rank, 2))
    assert own == (1 if apart else max(1, len(allowed) // 2))
    assert os.environ["GROUP_RANK"] == "0", "though nobody has said which node it is"


@with_ranks(3, fresh=True)
def test_ranks_of_unequal_nodes_that_a_script_has_started_know_their_node():
    """Of one rank and of two; nobody has said which node they are on."""
    place = (RankInfo(0, 3, 0, 1), RankInfo(1, 3, 0, 2), RankInfo(2, 3, 1, 2))[dist.get_rank()]
    own_cores(place)
    assert os.environ["GROUP_RANK"] == ("0", "1", "1")[place.rank]


UNCONFINED = {"SLURM_CPUS_PER_TASK": "6", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("told", "cores"),
    [({}, 6), ({"SLURM_STEP_NUM_TASKS": None}, 64), ({"SLURM_PTY_PORT": "40000"}, 64)],
    ids=["a task", "a batch script, which has the cores of all tasks", "a shell of srun --pty, which has them, too"],
)
def test_a_task_has_the_cores_that_it_was_given_though_slurm_does_not_confine_it(
    told: dict[str, str | None], cores: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for key, value in (UNCONFINED | told).items():
        monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)
    assert usable_cores(Path("/nowhere")) == cores


@pytest.mark.parametrize(("tasks", "own"), [(1, 3), (2, 6)])
@with_ranks(2, fresh=True)
def test_the_cores_of_a_task_are_for_all_ranks_that_it_has_started_or_for_the_one_that_it_is(tasks: int, own: int):
    rank = dist.get_rank()
    os.environ |= UNCONFINED | {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_PROCID": str(rank if tasks == 2 else 0)}
    with patch.object(os, "sched_getaffinity", lambda process: set(range(64))):
        assert own_cores(RankInfo(rank, 2, rank, 2)) == own


GIB = 2**30
DENIED: list[tuple[Callable[[Path], Any], str, dict[str, str], Any]] = [
    (usable_cores, "0::/", {"cpu.max": "max 100000\n"}, 64),
    (usable_cores, "0::/", {"cpu.max": "350000 100000\n"}, 4),
    (usable_cores, "0::/job/step", {"job/cpu.max": "200000 100000\n", "job/step/cpu.max": "max 100000\n"}, 2),
    (usable_cores, "0::/host/path/of/container", {"cpu.max": "50000 100000\n"}, 1),
    (usable_cores, "3:memory:/", {"cpu.max": "100000 100000"}, 64),
    (usable_cores, "0::/", {"cpu.max": "broken"}, 64),
    # As in a container with `docker run -m`, a pod with a limit, or a job with `--mem`.
    (usable_memory, "0::/", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 64 * GIB),
    (usable_memory, "0::/job", {"memory.max": f"{GIB}", "memory.current": "600",
                                "memory.stat": "anon 5\ninactive_file 500"}, GIB - 100),
    (usable_memory, "0::/docker/abc", {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}", "memory.stat": "anon 0"},
     0),
]  # fmt: skip
"""What is asked, of which cgroup a process is and what that says; and what is left on a machine with 64 of each."""


@pytest.mark.parametrize(("usable", "membership", "files", "left"), DENIED)
def test_what_a_cgroup_denies_does_not_count(
    usable: Callable[[Path], Any], membership: str, files: dict[str, str], left: Any, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    told = {"proc/self/cgroup": f"{membership}\n"} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert usable(machine(tmp_path, told)) == left


@pytest.mark.usefixtures("root")
@with_ranks(1, fresh=True)
def test_threads_that_the_user_may_not_start_are_no_firewall():
    os.setuid(47_110)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    with pytest.raises(UserError) as told, connecting(RankInfo(0, 1, 0, 1), HashStore(), 20.0):
        dist.new_group(backend="gloo")
    assert str(told.value) == (
        "rank 0 could not connect to the others: no more processes and threads may be started; raise `ulimit -u`, or "
        "the container's limit (`pids.max`)"
    )


def test_what_must_be_done_is_done_where_no_thread_may_be_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    call_within(1.0, done := Mock())
    done.assert_called_once_with()
