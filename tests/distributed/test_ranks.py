"""Who this process is."""

from __future__ import annotations

import pytest

from imagenet_fast.distributed.init import current_world
from imagenet_fast.distributed.ranks import TORCHRUN, RankInfo, rank_info_from_env
from imagenet_fast.launch.nodes import resolve_nodes
from tests.conftest import refusal_of, refuses


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
    assert RankInfo(9, 16, 1, 8).variables(node=1) == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    }, "what starts ranks in torchrun's stead tells them the same"  # fmt: skip


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_an_mpirun_do_not_train_each_by_itself(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "4")
    assert f"mpirun has started 4 of these ({name})" in refusal_of(resolve_nodes, 1, None, None, 300.0)
    assert f"mpirun has started 4 of these ({name})" in refusal_of(current_world)
    assert resolve_nodes(1, 4, "node0:29400", 300.0).count == 4, "one on each node is a launcher"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # srun's, of which the ranks are known otherwise
    assert resolve_nodes(1, None, None, 300.0).count == 1


@pytest.mark.parametrize(
    ("told", "refusal"),
    [
        ("WORLD_SIZE=1 RANK=0", None),  # a pod of one trains
        ("WORLD_SIZE=4", "has WORLD_SIZE but not .*; start it"), ("RANK=x", "has RANK but not .*; start it"),
        ("RANK=2 WORLD_SIZE=4", "has RANK and WORLD_SIZE but not .*; start it"),
        *(
            (" ".join(map("=".join, zip(TORCHRUN, place, strict=True))), "RANK=.*, but ranks count from 0, to below")
            for place in ("1101", "4404", "0400", ("-1", "4", "0", "4"), "0422", "0204")
        ),
    ],
)  # fmt: skip
def test_half_a_place_or_one_that_cannot_be_is_refused(told: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch):
    """Every pod would train by itself; and ranks that are counted from 1 would wait for rank 0."""
    for word in told.split():
        monkeypatch.setenv(*word.split("="))
    if refusal is None:
        assert rank_info_from_env() is None
        return
    refuses(refusal, rank_info_from_env)
