"""What ranks do is known to all: who is lost and who is stuck has a number, a host, a step and a phase."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from imagenet_fast.distributed import heartbeat, watchdog
from imagenet_fast.distributed.groups import write_flight_record
from imagenet_fast.distributed.heartbeat import Heartbeat, Here, Phase, describe_hang, describe_lost, publish, published
from imagenet_fast.distributed.ranks import ranges
from imagenet_fast.distributed.watchdog import Reason, Watchdog, leave_failure, watch_board
from imagenet_fast.recipe.schema import Timeout


def at(step: int, phase: Phase, for_s: float = 0.0, host: str = "node0") -> Heartbeat:
    return Heartbeat(host, step, phase, for_s)


HANG = partial(describe_hang, setting="timeout.step_s")
SENTENCES: tuple[tuple[Callable[..., str], dict[int, Heartbeat], str], ...] = (
    (partial(describe_lost, [2]), {0: at(1234, "sync", 37), 1: at(1234, "sync", 36), 2: at(1234, "backward", 0, "n7")},
     "rank 2 on n7 stopped answering in backward at step 1234; rank 0-1 waited in sync for 37 s"),
    (partial(describe_lost, [0]), {0: at(0, "start"), 1: at(0, "sync"), 2: at(0, "start")},
     "rank 0 on node0 stopped answering before the first step; rank 1 waited in sync; rank 2 was before the "
     "first step"),
    (partial(describe_lost, [1]), {0: at(3, "forward", 5)}, "rank 1 never answered; rank 0 was in forward at step 3"),
    (partial(describe_lost, [0, 1]), {0: at(3, "data"), 1: at(3, "data")},
     "rank 0-1 on node0 stopped answering in data at step 3"),
    (partial(describe_lost, [0, 1]), {0: at(9, "data"), 1: at(9, "evaluation", 0, "n1"), 2: at(9, "sync", 2)},
     "rank 0 on node0 stopped answering in data at step 9, rank 1 on n1 stopped answering in "
     "evaluation at step 9; rank 2 waited in sync for 2 s"),
    # Nobody is lost.
    (HANG, {0: at(12, "sync", 100), 1: at(12, "sync", 99), 3: at(12, "data", 101, "n2")},
     "rank 3 on n2 has been in data at step 12 for 101 s, longer than timeout.step_s allows; rank 0-1 waited in "
     "sync for 100 s"),
    # A GPU's host runs ahead.
    (HANG, {0: at(14, "forward", 100), 1: at(13, "backward", 90), 2: at(12, "checkpoint", 101)},
     "rank 2 on node0 has been in checkpoint at step 12 for 101 s, longer than timeout.step_s allows; rank 0 was in "
     "forward at step 14, rank 1 was in backward at step 13"),
    (HANG, {0: at(12, "sync", 100), 1: at(12, "sync", 100), 2: at(13, "sync", 98)},
     "all ranks have waited for each other for 100 s, longer than timeout.step_s allows: rank 0-1 in sync at "
     "step 12, rank 2 in sync at step 13"),
)  # fmt: skip


@pytest.mark.parametrize(("describe", "known", "sentence"), SENTENCES)
def test_who_is_lost_or_keeps_the_others_waiting_is_named_with_where_it_was_last_heard_of(
    describe: Callable[..., str], known: dict[int, Heartbeat], sentence: str
):
    assert describe(known=known) == sentence


@pytest.mark.parametrize("lost", [range(8, 16), range(0, 512, 3), [*range(100), 511]], ids=["node", "third", "many"])
def test_a_sentence_about_512_ranks_is_short(lost: range):
    phases: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "update")
    known = {rank: at(7 + rank % 2, phases[rank % 5], rank, f"node{rank // 8}") for rank in range(512)}
    assert len(describe_lost(list(lost), known)) < 600
    assert len(describe_hang(known, "timeout.step_s")) < 600
    together = known | {rank: at(7, "sync", 30) for rank in range(512) if rank not in lost}
    assert "all others waited in sync for 30 s" in describe_lost(list(lost), together)


def test_ranks_are_listed_by_runs_and_then_counted():
    assert ranges([1, 2, 3, 7]) == "1-3, 7"
    assert ranges([]) == ""
    assert ranges(range(0, 512, 2)) == "0, 2, 4, 6, 8, 10 and 250 more"


def test_what_is_done_for_the_first_time_may_take_longer():
    position, fresh = Here(), []
    assert position.fresh, "nothing has been done yet"
    for phase, step in (
        ("data", 1), ("forward", None), ("backward", None), ("sync", None), ("data", 2), ("sync", None),
        ("evaluation", None), ("sync", None), ("data", 3), ("evaluation", None), ("checkpoint", None), ("data", 4),
    ):  # fmt: skip
        position.enter(phase, step)
        fresh.append(position.fresh)
    assert fresh == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 2 + [True, False]
    assert position.at == (4, "data")
    for step, size in ((4, 32), (5, 32), (6, 64), (7, 64)):  # blocks are compiled for each size
        position.enter("data", step)
        position.enter("forward", shape=(8, 3, size, size))
        fresh.append(position.fresh)
    assert fresh[-4:] == [True, False, True, False]


def test_waiting_restores_phase_unless_it_failed():
    position = Here()
    position.enter("forward", 3)
    with position.waiting():
        assert position.at == (3, "sync")
    assert position.at == (3, "forward")
    with pytest.raises(RuntimeError), position.waiting():
        raise RuntimeError("Connection closed by peer")
    assert position.at == (3, "sync")


def test_what_is_published_is_read_by_ranks_and_by_whoever_started_them(tmp_path: Path):
    board, last, file = watch_board(HashStore()), Heartbeat("node7", 12, "backward", 3.5), tmp_path / "2"
    publish(board, 2, last, file)
    assert published(board, range(4)) == {2: last}
    assert heartbeat.describe_exit(2, "was killed by SIGKILL", file) == (
        "rank 2 on node7 was killed by SIGKILL in backward at step 12"
    )
    assert heartbeat.describe_exit(3, "was killed by SIGKILL", tmp_path / "3") == "rank 3 was killed by SIGKILL"
    left = leave_failure(board, Reason("d\udcff/1.png cannot be read"))
    assert left == Reason(r"d\udcff/1.png cannot be read"), "is not UTF-8"
    assert [*tmp_path.iterdir()] == [file]


@pytest.fixture
def position(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Where this process is, which is no rank."""
    own = Here()
    monkeypatch.setattr(watchdog, "here", own)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.02)
    return own


def test_a_rank_that_does_not_move_ends_and_tells_why(position: Here, capsys: pytest.CaptureFixture[str]):
    told: list[Reason] = []
    lonely = Watchdog(HashStore(), 0, 1, Timeout(first_step_s=3, step_s=1), told.append)
    lonely.tick(2)
    position.enter("data", 1)
    lonely.tick(2)
    lonely.tick(2)
    position.enter("data", 1)  # the next micro-batch: it goes on
    for _ in range(2):
        lonely.tick(1.5)
    position.enter("data", 2)
    lonely.tick(1)
    lonely.tick(1)
    with pytest.raises(SystemExit):
        lonely.tick(1)
    sentence = f"rank 0 on {socket.gethostname()} has been in data at step 2 for 2 s, longer than timeout.step_s allows"
    assert told == [Reason(sentence)]
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (at(1, "sync", 4), "all ranks have waited for each other for 26 s, longer than timeout.first_step_s allows: "
         "rank 0-1 in sync at step 1"),
        (None, "rank 1 on node0 stopped answering in evaluation at step 1; rank 0 waited in sync for 26 s"),
    ],
    ids=["waits, too", "is lost"],
)  # fmt: skip
def test_a_rank_that_waits_is_as_alive_as_the_one_it_waits_for(position: Here, last: Heartbeat | None, sentence: str):
    """However long that one takes, which ends by its own watchdog if it hangs."""
    store, told = HashStore(), list[Reason]()
    waiting = Watchdog(store, 0, 2, Timeout(first_step_s=3, step_s=3), told.append)
    position.enter("sync", 1)
    for number in range(1, 14):
        publish(watch_board(store), 1, replace(at(1, "evaluation", number), beat=number))
        waiting.tick(2)
    if last is not None:
        publish(watch_board(store), 1, replace(last, beat=14))
        threading.Timer(0.05, publish, (watch_board(store), 1, replace(last, beat=15))).start()
    with pytest.raises(SystemExit):
        waiting.tick(2)
    assert told == [Reason(sentence)]


def test_first_step_is_published_at_once(position: Here):
    store = HashStore()
    watched = Watchdog(store, 0, 1, Timeout(), print)
    position.enter("forward", 1)
    watched.tick(0.1)
    assert published(watch_board(store), [0])[0].step == 1
    position.enter("forward", 2)
    watched.tick(0.1)
    assert published(watch_board(store), [0])[0].step == 1, "later ones once a second"
    watched.tick(1.0)
    assert published(watch_board(store), [0])[0].step == 2


def test_watchdog_ends_a_stuck_rank_after_a_failure(position: Here, capsys: pytest.CaptureFixture[str]):
    store, told = HashStore(), list[Reason]()
    stuck = Watchdog(store, 0, 2, Timeout(), lambda reason: told.append(reason) or 4)
    leave_failure(watch_board(store), Reason("rank 1: OutOfMemoryError: as it is"))
    stuck.tick(3)
    assert not told
    with pytest.raises(SystemExit, match="4"):
        stuck.tick(3)
    assert told == [Reason("rank 1: OutOfMemoryError: as it is")]
    assert capsys.readouterr().err == "", "rank 1 has said it"


class Deaf:
    """A store whose node is gone."""

    def __getattr__(self, request: str) -> Callable[..., None]:
        def ask(*arguments: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        return ask


def test_without_a_store_a_rank_still_ends(position: Here, monkeypatch: pytest.MonkeyPatch):
    told: list[Reason] = []
    lonely = Watchdog(HashStore(), 0, 2, Timeout(first_step_s=2), told.append)
    monkeypatch.setattr(lonely._board, "_store", Deaf())
    lonely.tick(1.5)
    with pytest.raises(SystemExit):
        lonely.tick(1.5)
    ((sentence, _),) = told
    assert sentence.endswith("; the store of all ranks, which could name others, has ended")


@pytest.mark.parametrize("used", ["_dump_nccl_trace", "_dump_fr_trace"])
def test_what_is_left_is_the_record_of_the_backend_in_use(used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch has two, and asked for the one that is not in use it answers with an empty one."""
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        record = pickle.dumps({"entries": [{"profiling_name": "nccl:all_reduce"}] if name == used else []})
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda record=record: record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    write_flight_record(3, tmp_path / "run")
    assert len(pickle.loads((tmp_path / "run" / "nccl" / "rank-3").read_bytes())["entries"]) == 1
    write_flight_record(3, Path("/proc/nowhere"))
