"""What srun says of its tasks, as its manual has it."""

from __future__ import annotations

import pytest

from imagenet_fast.distributed.ranks import TORCHRUN, srun_to_torchrun_env, step_nodes
from imagenet_fast.launch.nodes import resolve_nodes
from tests.conftest import refuses


def step(tasks: int, per_node: str, nodes: str, rank: int = 0, node: int = 0, local: int = 0) -> dict[str, str]:
    """The environment of one task of a job step."""
    return {
        "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local),
    }  # fmt: skip


def adopted(environment: dict[str, str], **options: bool) -> dict[str, str]:
    """What a rank of this environment is told beyond it, or otherwise."""
    after = dict(environment)
    srun_to_torchrun_env(after, **options)
    return {key: after.get(key, "gone") for key in environment | after if environment.get(key) != after.get(key)}


def as_torchrun(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return dict(zip(TORCHRUN, map(str, (rank, size, local, local_size)), strict=True))


def test_several_tasks_a_node_are_ranks():
    environment = step(20, "8(x2),4", "gpu[07-08,11]", rank=17, node=2, local=1)
    told = adopted(environment)
    assert told.items() >= (as_torchrun(17, 20, 1, 4) | {"MASTER_ADDR": "gpu07"}).items()
    assert 1024 < int(told["MASTER_PORT"]) < 2**16
    assert step_nodes(environment | told) is None
    for rank, node, local in ((0, 0, 0), (7, 0, 7), (8, 1, 0), (16, 2, 0), (19, 2, 3)):
        on = step(20, "8(x2),4", "gpu[07-08,11]", rank=rank, node=node, local=local)
        assert adopted(on)["GROUP_RANK"] == str(node)
    in_turn = step(4, "2(x2)", "a,b", rank=2, node=0, local=1) | {"GROUP_RANK": "9"}  # by a torchrun around it
    assert adopted(in_turn)["GROUP_RANK"] == "0", "srun's, which deals tasks out in turn"
    own = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "3"}
    assert not own.keys() & adopted(environment | own).keys(), "what a user has set stays"


def test_one_task_a_node_starts_ranks_of_its_own():
    environment = step(64, "1(x64)", "rack[1-8]-node[01-08]", rank=3, node=3)
    assert not adopted(environment)
    to_a_loop_of_ones_own = adopted(environment, one_a_node=True)
    assert to_a_loop_of_ones_own.items() >= (as_torchrun(3, 64, 0, 1) | {"MASTER_ADDR": "rack1-node01"}).items()
    count, endpoint = step_nodes(environment) or (0, "")
    assert (count, endpoint.partition(":")[0]) == (64, "rack1-node01")
    assert step_nodes(step(64, "1(x64)", "rack[1-8]-node[01-08]", rank=9, node=9)) == (count, endpoint)
    assert step_nodes(environment | {"SLURM_STEP_ID": "3"}) != (count, endpoint), "another step has another port"


def test_the_first_host_of_a_list():
    first = {"a,b": "a", "n[3,5]": "n3", "n[001-100].cluster,m": "n001.cluster", "h-[2-3]-x[5-6]": "h-2-x5"}
    found = {nodes: step_nodes(step(2, "1(x2)", nodes)) or (0, "") for nodes in first}
    assert {nodes: endpoint.partition(":")[0] for nodes, (_, endpoint) in found.items()} == first


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        step(1, "1", "a"),
        step(8, "4(x2)", "a,b") | as_torchrun(3, 4, 1, 2),
    ],
    ids=["a batch script", "a single task", "srun torchrun"],
)
def test_whoever_is_no_task_of_several_stays_as_it_is(environment: dict[str, str]):
    assert not adopted(environment)
    assert step_nodes(environment) is None or "RANK" in environment


@pytest.mark.parametrize("given", [None, "node0:29400"])
def test_an_endpoint_of_ones_own_leaves_the_nodes_sruns(given: str | None, monkeypatch: pytest.MonkeyPatch):
    """Else each node would be a job of its own, and train the whole batch."""
    for key, value in step(4, "1(x4)", "node[0-3]", rank=2, node=2).items():
        monkeypatch.setenv(key, value)
    found = resolve_nodes(1, None, given, 5)
    assert found.count == 4
    assert found.endpoint.host == "node0"
    assert (found.endpoint.port == 29400) == (given is not None)
    assert resolve_nodes(1, "2", "node0:29400", 5).count == 2, "what is asked for counts"


def test_the_shell_of_srun_pty_is_no_task_of_several_and_steps_that_it_starts_have_tasks(
    monkeypatch: pytest.MonkeyPatch,
):
    """They inherit its variables; only the shell is task 0 and has a terminal."""
    monkeypatch.setattr("imagenet_fast.distributed.ranks._has_terminal", lambda: True)
    environment = step(8, "8", "a") | {"SLURM_PTY_PORT": "40000"}
    refuses(r"srun --pty has started 8 tasks, .* --nodes 1 to start ranks", srun_to_torchrun_env, environment)
    assert "RANK" not in adopted(environment, chosen=True)
    nodes = step(4, "1(x4)", "n[1-4]") | {"SLURM_PTY_PORT": "40000"}
    srun_to_torchrun_env(nodes, chosen=True)
    assert step_nodes(nodes) is None
    for rank, terminal in ((0, False), (3, True)):
        monkeypatch.setattr("imagenet_fast.distributed.ranks._has_terminal", lambda terminal=terminal: terminal)
        environment = step(8, "8", "a", rank=rank, local=rank) | {"SLURM_PTY_PORT": "40000"}
        told = adopted(environment, chosen=True, one_a_node=True)
        assert (told["RANK"], told["WORLD_SIZE"]) == (str(rank), "8")
