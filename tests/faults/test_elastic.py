"""Nodes that leave and join while they train: launchers of one rank each, all on this node."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagenet_fast.distributed.network import Endpoint, await_listener
from tests.e2e.command import events_of, outcome_of, setting, wait_for
from tests.faults.jobs import Running, start
from tests.ports import free_port

pytestmark = pytest.mark.weekly

Start = Callable[..., Running]
LATE_S = 240.0  # to import torch, to take a silent node for lost, to wait for the last


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    """Starts the same command on another node; the first has the endpoint, which the others then find taken."""
    started: list[Running] = []
    with free_port() as port:

        def begin(*arguments: str) -> Running:
            options = ("--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--set", "checkpoint.every_steps=4")
            started.append(start(tmp_path / "run", *options, *arguments))
            await_listener(Endpoint("127.0.0.1", port), time.monotonic() + LATE_S)
            return started[-1]

        yield begin
        for running in started:
            running.kill_at_once()


def test_a_node_that_is_killed_leaves_the_others_to_go_on_to_the_end(node: Start, tmp_path: Path):
    options = ("--nodes", "2:3", "--set", "epochs=4")
    first, second, third = (node(*options) for _ in range(3))
    wait_for(lambda: first.step >= 6, LATE_S)
    third.command.send_signal(signal.SIGKILL)
    assert [first.ended(LATE_S), second.ended(60)] == [0, 0], (tmp_path / "run.log").read_text()[-4000:]
    outcome = outcome_of(tmp_path / "run")
    assert (outcome["status"], outcome["world_size"], outcome["steps"], outcome["resumed"]) == ("finished", 2, 40, 1)
    (resumed,) = events_of(tmp_path / "run", "resume")
    assert resumed["moved"]
    assert resumed["step"] >= 4
    assert [event["step"] for event in events_of(tmp_path / "run", "train")] == list(range(1, 41))


def test_nodes_that_join_or_are_told_to_leave_cost_no_step(node: Start, tmp_path: Path):
    options = ("--nodes", "1:2", *setting("epochs=1000", "checkpoint.every_steps=0", "eval_every=1000"))
    run = tmp_path / "run"

    def resumed() -> list[int]:
        return [event["step"] for event in events_of(run, "resume")] if (run / "events.jsonl").is_file() else []

    first = node(*options)
    wait_for(lambda: first.step >= 3, LATE_S)
    second = node(*options)
    wait_for(lambda: len(resumed()) == 1, LATE_S)
    wait_for(lambda: first.step >= resumed()[0] + 3, LATE_S)
    second.command.send_signal(signal.SIGTERM)
    assert second.ended(60) == 4, "saved"
    wait_for(lambda: len(resumed()) == 2, LATE_S)
    wait_for(lambda: first.step >= resumed()[1] + 3, LATE_S)
    assert not (run / "outcome.json").exists(), "it goes on"
    first.command.send_signal(signal.SIGTERM)
    assert first.ended(60) == 4
    outcome = outcome_of(run)
    assert (outcome["status"], outcome["world_size"], outcome["resumed"]) == ("preempted", 1, 2)
    steps = [event["step"] for event in events_of(run, "train")]
    assert steps == list(range(1, outcome["steps"] + 1))
    joined, left = resumed()
    assert 3 <= joined < joined + 3 <= left, "each time from the step before, as only a stop was saved"
