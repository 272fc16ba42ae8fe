"""Who this process is, and what it may use."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagenet_fast.distributed.cgroup_limits import usable_memory
from imagenet_fast.distributed.cpu_affinity import usable_cores
from imagenet_fast.distributed.rank_info import TORCHRUN, RankInfo, rank_info_from_env, set_group_rank
from imagenet_fast.errors import UserError
from tests.ranks import run


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)


def test_torchrun_tells_a_rank_its_place(monkeypatch: pytest.MonkeyPatch):
    assert rank_info_from_env() is None
    for key, value in zip(TORCHRUN, ("9", "16", "1", "8"), strict=True):
        monkeypatch.setenv(key, value)
    assert rank_info_from_env() == RankInfo(9, 16, 1, 8)
    assert RankInfo(9, 16, 1, 8).is_multi_node
    assert not RankInfo(1, 8, 1, 8).is_multi_node


def test_what_starts_ranks_in_torchruns_stead_tells_them_the_same():
    assert RankInfo(9, 16, 1, 8).variables(node=1) == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    }  # fmt: skip


def test_a_node_has_a_number_though_nobody_has_said_it():
    environment: dict[str, str] = {}
    set_group_rank(RankInfo(9, 16, 1, 8), environment)
    assert environment == {"GROUP_RANK": "1"}
    set_group_rank(RankInfo(3, 16, 3, 8), environment)
    assert environment == {"GROUP_RANK": "1"}, "what torchrun has said stays"


@pytest.mark.parametrize("pod", [{"WORLD_SIZE": "4"}, {"WORLD_SIZE": "4", "RANK": "2"}, {"RANK": "x"}])
def test_half_a_place_is_refused_since_every_pod_would_train_by_itself(
    pod: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for key, value in pod.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=f"has {' and '.join(sorted(pod, key=TORCHRUN.index))} but not .*; start it"):
        rank_info_from_env()


def test_a_pod_of_one_trains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert rank_info_from_env() is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor to choose from")
def test_processors_taken_away_by_affinity_do_not_count():
    assert run(1, _usable_of_one, fresh=True) == [1]


def _usable_of_one() -> int:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return usable_cores()


def machine(root: Path, membership: str, **files: str) -> Path:
    """A file system of a node of 64 processors, with cgroups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 4),
        ("0::/job/step\n", {"job/cpu.max": "200000 100000\n", "job/step/cpu.max": "max 100000\n"}, 2),
        ("0::/host/path/of/container\n", {"cpu.max": "50000 100000\n"}, 1),
        ("4:cpu,cpuacct:/j\n", {"cpu/j/cpu.cfs_quota_us": "600000\n", "cpu/j/cpu.cfs_period_us": "100000\n"}, 6),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("3:memory:/\n", {"cpu.max": "broken"}, 64),
        ("0::/\n", {"cpu.max": "broken"}, 64),
    ],
)
def test_processors_that_a_cgroup_denies_do_not_count(
    membership: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert usable_cores(machine(tmp_path, membership, **files)) == cores


def test_without_any_of_it_there_is_one_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    "place",
    [
        ("1", "1", "0", "1"), ("4", "4", "0", "4"), ("0", "4", "0", "0"), ("-1", "4", "0", "4"), ("0", "4", "2", "2"),
        ("0", "2", "0", "4"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_refused(place: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Such as ranks that are counted from 1: the others would wait for rank 0."""
    for key, value in zip(TORCHRUN, place, strict=True):
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=f"RANK={place[0]}, WORLD_SIZE={place[1]}, .*, but ranks count from 0, to"):
        rank_info_from_env()


_GIB = 2**30


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 64 * _GIB),
        ("0::/job\n", {"memory.max": f"{_GIB}", "memory.current": "600", "memory.stat": "anon 5\ninactive_file 500"},
         _GIB - 100),
        ("0::/docker/abc\n", {"memory.max": f"{_GIB}", "memory.current": f"{2 * _GIB}", "memory.stat": "anon 0"}, 0),
        ("9:memory:/j\n", {"memory/j/memory.limit_in_bytes": f"{_GIB}", "memory/j/memory.usage_in_bytes": "7",
                           "memory/j/memory.stat": "total_inactive_file 3"}, _GIB - 4),
        ("9:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}", "memory/memory.usage_in_bytes": "7",
                          "memory/memory.stat": ""}, 64 * _GIB),
        ("4:cpu:/\n", {"memory.max": "1"}, 64 * _GIB),
    ],
)  # fmt: skip
def test_memory_that_a_cgroup_denies_does_not_count(
    membership: str, files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a container with `docker run -m`, a pod with a limit, or a job with `--mem`."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * _GIB))
    assert usable_memory(machine(tmp_path, membership, **files)) == left
