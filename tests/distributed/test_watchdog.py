"""Ranks that fail at once: one looks whose heart still beats, the others hear what it found, or look themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore, Store

from imagenet_fast.distributed import watchdog
from imagenet_fast.distributed.heartbeat import Heartbeat, publish
from imagenet_fast.distributed.watchdog import Reason, find_culprit, find_lost_ranks, leave_failure, watch_board
from imagenet_fast.recipe.schema import Timeout

WORLD = 8


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads are heard at once."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ((), "nobody is lost"), ((5,), "rank 5 never answered; all others waited in sync"),
        ((0, 1, 6), "rank 0-1, 6 never answered; all others waited in sync"),
        ((3, 5), "rank 3, 5 never answered; all others waited in sync"),  # the one that looks is lost before it has
    ],
)  # fmt: skip
def test_all_ranks_hear_the_same_and_ask_little(lost: tuple[int, ...], sentence: str):
    shared = HashStore()
    if 3 in lost:
        watch_board(shared).count("search")
    stores = {rank: Mock(wraps=shared) for rank in range(WORLD) if rank not in lost}
    with beating(shared, list(stores)):
        assert told_at_once(stores) == dict.fromkeys(stores, sentence)
    assert 3 in lost or sum(store.multi_get.called for store in stores.values()) == 1, "one looks who is there"
    assert max(len(store.method_calls) for store in stores.values()) < 80, "whatever the number of ranks"


def test_a_failure_that_a_rank_has_left_is_told_without_looking():
    shared = HashStore()
    leave_failure(watch_board(shared), Reason("rank 1: OutOfMemoryError"))
    stores = {rank: Mock(wraps=shared) for rank in (0, 2)}
    assert told_at_once(stores) == dict.fromkeys(stores, "rank 1: OutOfMemoryError")
    assert not any(store.multi_get.called for store in stores.values())


def test_a_rank_whose_heart_stopped_is_lost_unless_it_has_ended_in_order():
    shared = HashStore()
    with beating(shared, [1]):
        pass
    assert find_lost_ranks(watch_board(shared), [1, 2]) == [1, 2], "one is heard no more, one was never heard"
    watchdog.Watchdog(shared, 1, 3, Timeout(), print).publish(ended=True)
    assert find_lost_ranks(watch_board(shared), [1, 2]) == [2], "one has ended in order"


@contextmanager
def beating(store: Store, ranks: Sequence[int]) -> Iterator[None]:
    """Ranks that publish several heartbeats between two looks, all at one place."""
    leaving = threading.Event()

    def beat() -> None:
        number = 0
        while not leaving.wait(0.02):
            number += 1
            for rank in ranks:
                publish(watch_board(store), rank, Heartbeat("node0", 1, "sync", beat=number))

    heart = threading.Thread(target=beat)
    heart.start()
    yield
    leaving.set()
    heart.join()


def told_at_once(stores: dict[int, Mock]) -> dict[int, str]:
    """What each rank tells as the failure, every one in a thread of its own."""
    told: dict[int, str] = {}

    def fail(rank: int, store: Mock) -> None:
        told[rank] = find_culprit(watch_board(store), rank, WORLD, lambda known: Reason("nobody is lost"))[0].message

    threads = [threading.Thread(target=fail, args=(rank, store)) for rank, store in stores.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(told.items()))
