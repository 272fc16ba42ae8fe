"""What processes tell one another through a store: messages by key, the first of them, who is absent, and waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from imagenet_fast.distributed.board import Board


@pytest.fixture(params=[HashStore, partial(TCPStore, "127.0.0.1", 0, is_master=True, wait_for_workers=False)])
def store(request: pytest.FixtureRequest) -> Store:
    made: Callable[[], Store] = request.param
    return made()


@pytest.mark.parametrize("message", ["", "café d\udcff/1.png", 0, [1, None], {"host": "node0", "for_s": 2.5}])
def test_a_message_is_read_as_it_was_posted_and_only_on_its_own_part(message: Any, store: Store):
    board = Board(store, "nodes")
    assert board.read("told") is None
    board.post("told", message)
    assert Board(store, "nodes").read("told") == message
    assert Board(store, "ranks").read("told") is Board(store).read("told") is None
    board.remove("told", "never posted")
    assert board.read("told") is None


def test_of_several_that_post_at_once_the_first_is_believed_by_all(store: Store):
    assert [Board(store).first("failure", f"rank {rank} failed") for rank in (2, 0, 1)] == ["rank 2 failed"] * 3
    assert Board(store).read("failure") == "rank 2 failed"
    assert [Board(store).count("arrived") for _ in range(3)] == [1, 2, 3], "whoever counts has a number of its own"


@pytest.mark.parametrize(
    ("absent", "requests"), [((), 2), ((300,), 22), ((0, 511), 41), (range(512), 1024)], ids=["none", "1", "2", "all"]
)
def test_those_that_have_posted_are_gathered_with_few_requests(absent: range, requests: int):
    shared = HashStore()
    for rank in set(range(512)) - set(absent):
        Board(shared).post(f"beat/{rank}", {"step": rank})
    counted = Mock(wraps=shared)
    assert Board(counted).gather("beat", range(512)) == {r: {"step": r} for r in range(512) if r not in absent}
    assert len(counted.method_calls) <= requests
    assert Board(shared).gather("beat", []) == {}


def test_a_message_is_waited_for_until_the_deadline(store: Store):
    late = threading.Timer(0.3, lambda: [Board(store).post(f"part/{rank}", rank) for rank in (0, 1)])
    late.start()
    assert Board(store).read("part/0", time.monotonic() + 20) == 0
    assert Board(store).gather("part", (0, 1), time.monotonic() + 20) == {0: 0, 1: 1}
    begun = time.monotonic()
    assert Board(store).read("never", begun + 0.3) is None
    assert Board(store).gather("part", (1, 2), begun + 0.6) == {1: 1}
    assert 0.6 <= time.monotonic() - begun < 5


def test_whoever_waits_may_do_something_meanwhile_or_leave(store: Store):
    """As a rank that publishes its own heartbeat while it looks for others', or has been told to stop."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Board(store, pause=pause).read("never", time.monotonic() + 60)
    assert pauses == sorted(pauses), "it looks less and less often"
    assert (pauses[0], pauses[-1]) == (0.005, 0.25)
