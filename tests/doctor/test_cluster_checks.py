"""What ranks find out together, and how findings of several nodes are shown."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console

import tests
from imagenet_fast.distributed.ranks import rank_info_from_env
from imagenet_fast.doctor import host_checks
from imagenet_fast.doctor.cluster_checks import gather_results
from imagenet_fast.doctor.report import CheckResult, by_host, findings_table, read_results
from imagenet_fast.launch.rank import examine_as_rank
from imagenet_fast.recipe.job import DoctorJob
from imagenet_fast.run.launcher_dir import LauncherDir
from tests.ports import free_port
from tests.ranks import run, with_ranks


@with_ranks(2)
def test_two_ranks_measure_what_is_between_them_and_tell_the_same_of_one_node_and_of_two() -> None:
    rank = dist.get_rank()
    notes = gather_results([CheckResult("torch", "ok", "2.15")] if rank == 0 else [], tests.world(), "a")
    assert [(note.about, note.state) for note in notes] == [("torch", "ok"), ("all-reduce", "ok")]
    assert "Gbit/s" in notes[-1].said
    notes = gather_results([CheckResult("torch", "ok", f"2.1{rank}")], tests.world(local_rank=0, local_size=1), "same")
    assert [(n.about, n.host) for n in notes[:2]] == [("torch", "same"), ("torch", "same (1)")]
    assert [(n.about, n.state) for n in notes[2:]] == [("all-reduce", "ok")]


def test_a_node_that_looks_through_slow_data_has_come_all_the_same(tmp_path: Path):
    """Ranks wait for one another for a time, and for what one of them does as long as in training."""
    with free_port() as port:
        run(2, _examined, port, tmp_path, fresh=True)
    assert [found.said for found in read_results(LauncherDir(tmp_path).results) or []][:1] == ["at last"]


def _examined(port: int, folder: Path) -> None:
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = rank_info_from_env()
    assert rank is not None

    def slowly(*_: object) -> list[CheckResult]:
        time.sleep(1.5)
        return [CheckResult("data", "ok", "at last")]

    with patch.object(host_checks, "examine", slowly):
        examine_as_rank(DoctorJob(None, folder), rank, 1.0, LauncherDir(folder))


def test_one_rank_alone_has_nobody_to_measure():
    told = run(1, gather_results, [], tests.world(), "a")
    assert told == [[CheckResult("all-reduce", "ok", "one rank alone needs none")]]


TORCH = CheckResult("torch", "ok", "2.15.0")


def test_what_all_machines_have_alike_is_told_once_and_what_differs_of_each():
    assert by_host({"a": [TORCH], "b": [TORCH]}) == [TORCH]
    full = CheckResult("/dev/shm", "warn", "0.1 GiB free", "give it more")
    roomy = CheckResult("/dev/shm", "ok", "8.0 GiB free")
    told = by_host({"a": [full, TORCH], "b": [roomy, TORCH]})
    assert [(finding.about, finding.host, finding.state) for finding in told] == [
        ("/dev/shm", "a", "warn"), ("/dev/shm", "b", "ok"), ("torch", "", "ok"),
    ]  # fmt: skip
    card = CheckResult("GPU 0", "ok", "a card")
    assert by_host({"a": [], "b": [card]}) == [CheckResult("GPU 0", "ok", "a card", "", "b")]


def test_the_table_shows_brackets_of_a_path_as_they_are():
    console = Console(width=100, no_color=True)
    with console.capture() as shown:
        console.print(findings_table([CheckResult("data", "fail", "there is no [red]/x", "look", "node1")]))
    assert shown.get().split() == ["fail", "data", "node1:", "there", "is", "no", "[red]/x;", "look"]
