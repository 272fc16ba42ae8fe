"""Several nodes: README's command on each, on nodes whose names lead to the loopback interface."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.distributed import join, versions
from imagenet_fast.distributed.init import current_world, init_distributed
from imagenet_fast.distributed.join import introduce, meet
from imagenet_fast.distributed.network import Endpoint, await_listener, parse_endpoint
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.schema import Timeout
from tests.e2e.command import outcome_of, setting
from tests.hosts import Hosts, hosts
from tests.launch.test_slurm import step
from tests.ports import free_port

SMALL = setting("epochs=1", "schedule.warmup_epochs=0", "global_batch=24", "data.train_images=24")
TINY = ("train", "--recipe", "smoke", "--nproc", "1", *SMALL)


@pytest.fixture(scope="module")
def network(root: None) -> Iterator[Hosts]:
    with hosts(3) as network:
        yield network


@pytest.mark.ci
def test_two_nodes_meet_by_name_and_share_a_folder(network: Hosts, tmp_path: Path):
    run, options = tmp_path / "run", ("--nodes", "2", "--rdzv-endpoint", "node1:29401", "--set", "target_top1=1")
    ended = network.run([(*TINY, *options, "--out", str(run))] * 2)
    assert [(code, errors) for code, _, errors in ended] == [(0, "")] * 2, ended
    assert ["Target reached" in printed for _, printed, _ in ended] == [False, True], "who has the endpoint leads"
    outcome = outcome_of(run)
    assert (outcome["world_size"], outcome["status"]) == (2, "reached")
    assert 0 < outcome["time_to_accuracy_s"] <= outcome["run_s"]
    assert "--nodes" in json.loads((run / "job.json").read_text())["command"]
    variables = json.loads((run / "environment.json").read_text())["variables"]
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


@pytest.mark.ci
def test_tasks_of_srun_are_the_ranks_of_a_loop_of_ones_own_and_meet_by_name(network: Hosts):
    assert network.call([(node, mean_of_ranks, (node,)) for node in range(2)]) == [0.5, 0.5]


def mean_of_ranks(node: int) -> float:
    """As a task of srun's, one on each node."""
    os.environ |= step(2, "1(x2)", "node[0-1]", rank=node, node=node)
    world = current_world()
    number = torch.tensor(float(world.rank))
    dist.all_reduce(number)
    return number.item() / world.size


def met(
    endpoint: str, count: int, join_timeout_s: float = 20.0, late_s: float = 0.0, least: int | None = None,
    stays_s: float = 1.0,
) -> tuple[int, str]:  # fmt: skip
    """This node's number, once all have met, and the name of the meeting."""
    time.sleep(late_s)
    meeting = meet(parse_endpoint(endpoint), count, join_timeout_s, least)
    time.sleep(stays_s)  # the number 0 holds the store, as long as its ranks train
    return meeting.number, meeting.name


def said(answers: list[Any]) -> list[str]:
    assert all(isinstance(answer, UserError) for answer in answers), answers
    return [str(answer) for answer in answers]


@pytest.mark.ci
def test_whoever_has_the_endpoint_is_the_first(network: Hosts):
    there = network.call([(n, met, ("node2:29402", 3)) for n in range(3)])
    assert sorted(place for place, _ in there) == [0, 1, 2]
    assert there[2][0] == 0
    assert len({name for _, name in there}) == 1
    early = network.call([(0, met, ("node1:29402", 2)), (1, met, ("node1:29402", 2, 20.0, 0.7))])
    assert [place for place, _ in early] == [1, 0]
    again = network.call([(0, met, ("127.0.0.1:29403", 3))] * 3)
    assert sorted(place for place, _ in again) == [0, 1, 2], "on one node the first to come"
    assert {name for _, name in there}.isdisjoint(name for _, name in again), "torchrun takes it for the run's id"


def placed(endpoint: str, place: int, late_s: float) -> int:
    """The number of the node that the scheduler counts as ``place``."""
    os.environ["SLURM_NODEID"] = str(place)
    return met(endpoint, 3, 20.0, late_s)[0]


@pytest.mark.ci
def test_nodes_are_numbered_as_the_scheduler_counts_them(network: Hosts):
    """Whenever they come, behind the one that has the endpoint: neighbours in a ring are then on one switch."""
    calls = [(n, placed, ("node1:29406", 10 * n, 0.6 if n == 0 else 0.0)) for n in range(3)]
    assert network.call(calls) == [1, 0, 2]


@pytest.mark.weekly
def test_one_that_is_missing_ends_the_meeting_for_all_in_the_same_words(network: Hosts):
    (sentence,) = set(said(network.call([(n, met, ("node0:29404", 3, (1.5, 9.0)[n])) for n in range(2)])))
    assert sentence == (
        "2 of 3 nodes came to node0:29404 within 1.5 s (node0, node1); start the same command on the others, or wait "
        "longer with --join-timeout"
    )


@pytest.mark.ci
def test_one_too_many_is_turned_away_and_the_others_meet(network: Hosts):
    calls = [(n, met, ("node0:29405", 2, 20.0, 0.0 if n < 2 else 2.0, None, 4.0)) for n in range(3)]
    (first, _), (second, _), third = network.call(calls)
    assert (first, second) == (0, 1)
    assert "2 nodes have already met at node0:29405: this one is too many" in str(third)


def pod(endpoint: str, late_s: float, dies_after_s: float = 0.0) -> int:
    """The number of the pod node1-0, wherever that is now."""
    os.environ["JOB_COMPLETION_INDEX"] = "1"
    socket.sethostname("node1")
    return mortal(endpoint, late_s, dies_after_s)


def mortal(endpoint: str, late_s: float, dies_after_s: float = 0.0) -> int:
    """The number of a node among three, of which some are killed while they wait."""
    if dies_after_s:
        Timer(dies_after_s, os._exit, (9,)).start()
    return met(endpoint, 3, 20.0, late_s, stays_s=3.0)[0]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("node", "again", "late_s"), [(mortal, 1, 2.5), (pod, 2, 2.5), (mortal, 1, 4.5)],
    ids=["on its node", "a pod on another", "after all had come"],
)  # fmt: skip
def test_a_node_that_was_killed_while_it_waited_is_replaced(
    node: Callable[..., int], again: int, late_s: float, network: Hosts
):
    """Those who come are known by name: else the others would go on with the dead one, and the new one be too many."""
    at = "node0:29417"
    calls = [(0, mortal, (at, 0.0)), (1, node, (at, 0.0, 1.5)), (again, node, (at, late_s)), (2, mortal, (at, 3.5))]
    assert sorted(network.call(calls)) == [0, 1, 2, 9]


def warned(late_s: float, clock_s: float) -> list[str]:
    """What a node is warned of whose clock goes wrong by so much."""
    right = time.time
    with patch("imagenet_fast.distributed.join.warn") as warn, patch("time.time", lambda: right() + clock_s):
        met("node0:29418", 2, 20.0, late_s)
    return [call.args[0] for call in warn.call_args_list]


@pytest.mark.ci
def test_a_node_whose_clock_goes_wrong_is_told_so(network: Hosts):
    """To come later is no sign of it."""
    told = "the clocks of node1 and of the node at node0:29418 are 60 s apart; start chrony or ntpd on every node"
    for wrong_s, warnings in ((-60.0, [told]), (0.5, [])):
        assert network.call([(0, warned, (0.0, 0.0)), (1, warned, (3.0, wrong_s))]) == [[], warnings]


def test_nodes_with_different_programs_are_refused():
    said = [f"imagenet-fast 0.1.0 (sources {digest}) with torch 2.11.0" for digest in "ab"]
    nodes = [{"host": f"node{n}", "software": said[n], "device": "cpu", "agreed": {}} for n in range(2)]
    assert join._difference(nodes[0], nodes[1], 8) == (
        f"rank 0 (node0) runs {said[0]} and rank 8 (node1) runs {said[1]}; install the same on every node"
    )


def test_the_program_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Copies of one version may differ, and say nothing of a commit."""
    monkeypatch.setattr(versions, "_PACKAGE", tmp_path)
    told = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "order.py").write_text(text)
        told.append(versions.software())
    assert told[0] == told[2] != told[1]
    assert (f"with torch {torch.__version__}" in told[0], versions.commit()) == (True, "")


@pytest.mark.ci
def test_elastic_rendezvous_takes_more_nodes(network: Hosts):
    there = network.call([(n, met, ("node1:29408", 2, 20.0, (0.0, 0.0, 0.3)[n], 2)) for n in range(3)])
    assert [place for place, _ in there] == [1, 0, 2]
    assert len({name for _, name in there}) == 1
    (alone,) = said(network.call([(0, met, ("node0:29409", 3, 0.5, 0.0, 2))]))
    assert alone.startswith("1 of at least 2 nodes came to node0:29409 within 0.5 s (node0); start the same command")


@pytest.mark.parametrize(
    ("others", "told"), [((3, 20.0), "--nodes 3"), ((2, 20.0, 0.0, 1), "--nodes 1:2")], ids=["number", "range"]
)
def test_nodes_that_disagree_refuse_each_other(others: tuple[float, ...], told: str, network: Hosts):
    answers = network.call([(0, met, ("node0:29407", 2)), (1, met, ("node0:29407", *others))])
    assert set(said(answers)) == {f"one node was told {told}, the one at node0:29407 --nodes 2; correct one"}


@pytest.mark.weekly
def test_a_host_that_cannot_be_reached_is_named_in_time(network: Hosts):
    begun = time.monotonic()
    places = ("10.77.9.9:29400", "nowhere:29400", "node1:29400")
    silent, unknown, refused = said(network.call([(n, met, (place, 2, 1.0)) for n, place in enumerate(places)]))
    assert time.monotonic() - begun < 15
    assert "at 10.77.9.9:29400 within 1 s: " in silent
    assert "the name nowhere cannot be resolved here" in unknown
    assert "at node1:29400 within 1 s: connection refused; start the same command on that host" in refused


def test_a_name_that_does_not_resolve_is_told_at_once_and_tried_on(monkeypatch, capsys: pytest.CaptureFixture[str]):
    """As those of nodes that only Slurm knows."""
    answers = [socket.gaierror(), socket.gaierror(), ConnectionRefusedError(), Mock()]
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=answers))
    await_listener(Endpoint("gpu07", 29400), time.monotonic() + 30)
    said = "the name gpu07 cannot be resolved here; give an address, or add it to /etc/hosts; it is tried for 30 s"
    assert capsys.readouterr().err == f"warning: {said}\n"


def introduced(
    place: RankInfo, agreed: dict[str, Any], port: int, join_timeout_s: float = 20.0, device: str = "cpu"
) -> str | None:
    """The interface that is settled upon, by ranks of a torchrun of the user's own at node0."""
    os.environ |= {"MASTER_ADDR": "node0", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
    store = introduce(place, agreed, join_timeout_s, device)
    time.sleep(0.5)
    del store  # of which rank 0 holds the other end
    return os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.ci
def test_ranks_find_the_interface_that_leads_to_the_others_by_themselves(network: Hosts):
    """Rank 0 too, to which the address of all, its own host's name, is a loopback address."""
    agreed = {"recipe": "a"}
    assert network.call([(n, introduced, (RankInfo(n, 3, 0, 1), agreed, 29410)) for n in range(3)]) == ["eth0"] * 3
    here = network.call([(0, introduced, (RankInfo(n, 2, n, 2), agreed, 29411)) for n in range(2)])
    assert here == [None, None], "on one node there is nothing to settle"


JOB = {"epochs": 3, "optim": {"kind": "sgd", "lr": 1.0}, "data": {"flip": True}}
OTHER = JOB | {"epochs": 4, "optim": {"kind": "sgd", "lr": 2.0, "nesterov": True}}
TOLD = "were told different things"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("nodes", "jobs", "devices", "sentence"),
    [
        ((0, 1, 2), (JOB, JOB, OTHER), ["cpu"] * 3, f"rank 0 (node0) and rank 2 (node2) {TOLD}: epochs is 3 and 4, "
         "optim.lr is 1.0 and 2.0, optim.nesterov is unset and true; give every node the same command"),
        # As with `srun bash -c 'imagenet-fast train --seed $SLURM_PROCID'`; a node's first rank speaks for it.
        ((0, 0), ({"seed": 0}, {"seed": 1}), ["cpu"] * 2,
         f"rank 0 (node0) and rank 1 (node0) {TOLD}: seed is 0 and 1; give every node the same command"),
        ((0, 1, 2), ({},) * 3, ["cuda", "cuda", "cpu"],
         "ranks compute on devices of one type, but rank 0 (node0) on cuda and rank 2 (node2) on cpu; run "
         "`imagenet-fast doctor` on both nodes, or set CUDA_VISIBLE_DEVICES= on every node to train on CPUs"),
    ],
    ids=["jobs", "jobs on one node", "devices"],
)  # fmt: skip
def test_ranks_that_differ_are_refused_at_once(
    nodes: tuple[int, ...], jobs: tuple[dict[str, Any], ...], devices: list[str], sentence: str, network: Hosts
):
    """As many others have not come yet."""
    here = len(nodes) // len(set(nodes))
    places = [RankInfo(n, 2 * len(nodes), n % here, here) for n in range(len(nodes))]
    calls = [(nodes[n], introduced, (place, jobs[n], 29412, 50.0, devices[n])) for n, place in enumerate(places)]
    assert set(said(network.call(calls, timeout_s=20))) == {sentence}


@pytest.mark.weekly
def test_ranks_that_do_not_come_and_a_master_that_is_not_rank_0s_machine_are_named(network: Hosts):
    calls = [(n, introduced, (RankInfo(n + n // 2, 6, 0, 1), {}, 29413, 1.0)) for n in range(3)]  # 0, 1 and 3
    (sentence,) = set(said(network.call(calls, timeout_s=30)))
    assert sentence.startswith("rank 2, 4-5 of 6 did not come within 1 s; see what its node says, or wait longer")
    lonely = network.call([(1, introduced, (RankInfo(1, 2, 0, 1), {}, 29414, 1.0))], timeout_s=30)
    assert "no node could be reached at node0:29414 within 1 s: connection refused" in said(lonely)[0]
    (wrong,) = said(network.call([(1, introduced, (RankInfo(0, 2, 0, 1), {}, 29415, 1.0))], timeout_s=30))
    assert "node0 is no address of the node that has rank 0" in wrong


def joined(place: RankInfo, port: int, interface: str) -> None:
    """A rank that joins by an interface of the user's."""
    os.environ |= {"MASTER_ADDR": "node0", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
    with init_distributed(place, {}, 20.0, Timeout()):
        pass


@pytest.mark.weekly
def test_ranks_that_cannot_connect_all_end_at_once(network: Hosts):
    """By the loopback interface, as those of a host whose name leads there did: one finds out, the others wait."""
    begun = time.monotonic()
    answers = network.call([(n, joined, (RankInfo(n, 3, 0, 1), 29416, "lo")) for n in range(3)])
    assert time.monotonic() - begun < 15
    found_out = [str(answer) for answer in answers if isinstance(answer, UserError)]
    assert found_out
    assert all("could not connect to the others" in s and "set GLOO_SOCKET_IFNAME" in s for s in found_out)
    assert all(answer == 2 for answer in answers if not isinstance(answer, UserError)), answers


def test_a_name_that_leads_here_only_after_a_while_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """As a pod's that has just been made: its name leads nowhere at first, or to the pod before it."""
    answers = iter([False, False, True, True])
    monkeypatch.setattr("imagenet_fast.distributed.join.is_here", lambda host: next(answers))
    with free_port() as port:
        assert meet(parse_endpoint(f"127.0.0.1:{port}"), 1, 10.0).number == 0


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use by another program; give every node"):
            meet(parse_endpoint(f"127.0.0.1:{port}"), count=1, join_timeout_s=1)
