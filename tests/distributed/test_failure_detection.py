"""A roll call among ranks that fail at once: one calls, whatever it costs is shared, and a caller may be lost too."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from imagenet_fast.distributed import failure_detection
from imagenet_fast.distributed.failure_detection import excuse, find_lost_ranks
from imagenet_fast.distributed.watchdog import Watchdog
from imagenet_fast.recipe.schema import Timeout

WORLD = 8


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads answer at once."""
    monkeypatch.setattr(failure_detection, "LOOK_S", 0.1)


class Gone(Exception):
    """This rank's process has ended."""


class Counted:
    """A store that lists what one rank asks of it; with ``fatal`` the rank ends as it looks which ranks are there."""

    def __init__(self, store: Store, fatal: bool = False) -> None:
        self._store = store
        self._fatal = fatal
        self.asked: list[tuple[str, Any]] = []

    def __getattr__(self, request: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked.append((request, arguments[0]))
            if self._fatal and self.looked:
                raise Gone
            return getattr(self._store, request)(*arguments)

        return ask

    @property
    def looked(self) -> bool:
        """Whether it has asked for several keys at once, as only the rank that calls does."""
        return any(request == "check" and len(keys) > 1 for request, keys in self.asked)


@pytest.mark.parametrize("absent", [(), (5,), (0, 1, 6)], ids=["nobody", "one", "three"])
def test_all_ranks_hear_the_same_and_ask_little(absent: tuple[int, ...]):
    shared = HashStore()
    stores = {rank: Counted(shared) for rank in range(WORLD) if rank not in absent}
    assert ask_at_once(stores) == {rank: list(absent) for rank in stores}
    assert sum(store.looked for store in stores.values()) == 1, "one rank looks who is there"
    assert max(len(store.asked) for store in stores.values()) < 50, "whatever the number of ranks"


def test_where_the_caller_is_lost_too_another_calls_and_names_it():
    shared = HashStore()
    with pytest.raises(Gone):
        find_lost_ranks(Counted(shared, fatal=True), 3, WORLD)
    stores = {rank: Counted(shared) for rank in range(WORLD) if rank not in (3, 5)}
    assert ask_at_once(stores) == {rank: [3, 5] for rank in stores}


def test_a_rank_that_is_stuck_answers_every_call():
    shared = HashStore()
    leaving = threading.Event()
    attendance = Watchdog(shared, 1, 3, Timeout(), print)

    def attend() -> None:
        while not leaving.wait(0.05):
            attendance.look(0.05)

    stuck = threading.Thread(target=attend)
    stuck.start()
    with pytest.raises(Gone):
        find_lost_ranks(Counted(shared, fatal=True), 0, 3)
    assert find_lost_ranks(shared, 2, 3) == [0]
    leaving.set()
    stuck.join()


def test_a_rank_that_has_ended_in_order_is_not_missed():
    shared = HashStore()
    excuse(shared, 1)
    assert ask_at_once({rank: Counted(shared) for rank in (0, 3)}, size=4) == {0: [2], 3: [2]}


@pytest.mark.long
def test_where_every_caller_is_lost_the_others_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failure_detection, "_CALLS", 2)
    shared = HashStore()
    for rank in range(3):
        with suppress(Gone):
            assert find_lost_ranks(Counted(shared, fatal=True), rank, WORLD) == [], "given up"


def ask_at_once(stores: dict[int, Counted], size: int = WORLD) -> dict[int, list[int]]:
    """What each rank hears, every one in a thread of its own."""
    heard: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank, store=store: heard.update({rank: find_lost_ranks(store, rank, size)}))
        for rank, store in stores.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(heard.items()))
