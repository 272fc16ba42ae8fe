"""How many nodes and ranks can be asked for, and what each number of them trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imagenet_fast.launch import nodes
from imagenet_fast.launch.job_setup import on_ranks, plan_job
from imagenet_fast.launch.nodes import local_ranks, parse_nodes, resolve_nodes
from imagenet_fast.recipe.load import load_recipe
from tests.conftest import refuses

SMOKE = load_recipe("smoke", overrides=["global_batch=24"])
RANGE = ("--nodes", "1:3", "--nproc", "1")
AT = ("--rdzv-endpoint", "node0:29400")
AUTO = (*AT, "--resume", "auto")


def test_nodes_are_a_number_or_a_range():
    asked = {"4": (None, 4), "2:4": (2, 4), "1:2": (1, 2), "3:3": (3, 3), "01": (None, 1)}
    assert {text: parse_nodes(text) for text in asked} == asked
    for text in ("4:2", "0:2", "a:b", "2:", ":2", "0", "-1", "", "2:4:8", "1.5", " 2", "2:4\n", "1:9999999", "²:4"):
        refuses("is no number of nodes, and no range of them; write for example 4 or 2:4", parse_nodes, text)


def test_nodes_that_may_leave_start_again_unless_told_otherwise():
    fixed, one_fewer, never = (
        resolve_nodes(1, asked, "a:1", 5, restarts) for asked, restarts in (("3", None), ("2:3", None), ("2:3", 0))
    )
    assert [fixed.restarts, one_fewer.restarts, never.restarts] == [0, 10, 0]
    assert (fixed.counts, one_fewer.counts) == (None, range(2, 4))
    assert (fixed.ranks, one_fewer.ranks) == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--nodes 1:3 needs --rdzv-endpoint HOST:PORT, the same on every node"),
        (AT, "--nodes 1:3 needs --resume auto --out DIR, a directory that all nodes share"),
        ((*AUTO, "--scale-batch"), "--scale-batch shrinks the batch to the ranks there are"),
        (AUTO, "--nodes 1:3 allows 3: global_batch 32 does not divide over 3 ranks in micro-batches of"),
    ],
)
def test_what_a_range_needs_is_said_before_anything_starts(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, refusal: Callable[..., str]
):
    out = tmp_path / "run"
    assert reason in refusal("train", "--recipe", "smoke", "--out", str(out), *RANGE, *arguments)
    assert not out.exists()


def test_whoever_is_there_trains_the_same_batch(tmp_path: Path):
    job = plan_job("smoke", SMOKE, 8, folder=tmp_path, resume=True, init_from=Path("/w.pth"), nodes=range(1, 5))
    assert job.elastic
    assert on_ranks(job, 8) == job
    on = {ranks: on_ranks(job, ranks) for ranks in (2, 4, 6, 8)}
    assert {fewer.batching.global_batch for fewer in on.values()} == {24}
    assert [fewer.batching.ranks for fewer in on.values()] == [2, 4, 6, 8]
    assert on[4].note.startswith("recipe written for 2 ranks: 4 ranks, micro-batch 6, 1 accumulation step; starts from")
    assert on[4].agreed() | {"all ranks": 8} == job.agreed()


def test_ranks_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "usable_memory", lambda: 2 * 2**30)
    assert local_ranks(13) == 13
    refuses(r"--nproc 10000 takes more than 1465 GiB of memory.*give at most 13", local_ranks, 10_000)
