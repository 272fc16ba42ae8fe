"""How the loss of a rank is noticed, and by which name it is called."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_LOOK_S = 0.5  # between two looks whether somebody calls the roll, or what came of it
_ANSWERED_IN = 4  # such looks
_CALLS = 3  # at most: another one only where the rank that called was lost before it knew


class PeerLost(RuntimeError):
    """A rank that closed its connection, or did not answer in time."""

    def __init__(self, rank: int, cause: Exception) -> None:
        fate = "did not answer in time" if "imed out" in str(cause) else "closed its connection"
        super().__init__(f"rank {rank} {fate} during an all-reduce; its own log says why")
        self.rank = rank


@contextmanager
def answering_roll_calls() -> Iterator[None]:
    """Have a thread answer when another rank asks who is left; this one may be stuck in a collective.

    The thread ends with the block: one that comes back from the store while Python ends would abort the process.
    """
    leaving = threading.Event()
    store = dist.distributed_c10d._get_default_store()
    thread = threading.Thread(target=answer_roll_calls, args=(store, dist.get_rank(), leaving), daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join(2 * _LOOK_S)  # no longer: the store may be gone, and slow to say so


def answer_roll_calls(store: Store, rank: int, leaving: threading.Event) -> None:
    """Say that ``rank`` is here whenever another one asks, until ``leaving`` is set or the store is gone."""
    with suppress(dist.DistError):
        for call in _calls():
            while not store.check([call]):
                if leaving.wait(_LOOK_S):
                    return
            store.set(f"{call}/{rank}", "")


def report_failure(error: Exception) -> str:
    """Why this rank ends, in a sentence, left for the other ranks in the store they met at; the first one stays.

    Where the error is a broken connection, the sentence names the ranks that were lost. Of an error that was raised
    from another, as torch's pipelines do, the first one counts.
    """
    rank = dist.get_rank()
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    message = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if _is_broken_connection(error):
            lost = lost_ranks(store, rank, dist.get_world_size())
            if lost:
                message = f"rank {', '.join(map(str, lost))} ended or stopped answering; its own output says why"
        store.compare_set("failure", "", message)
    return message


def reported_failure() -> str:
    """What :func:`report_failure` left, or nothing."""
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if store.check(["failure"]):
            return store.get("failure").decode()
    return ""


def _is_broken_connection(error: Exception) -> bool:
    """Whether a backend, or a collective of ours, could not reach another rank."""
    backend = any(name in str(error) for name in ("gloo", "Gloo", "NCCL", "Connection"))
    return isinstance(error, PeerLost | dist.DistError) or (isinstance(error, RuntimeError) and backend)


def lost_ranks(store: Store, rank: int, size: int) -> list[int]:
    """The ranks that do not answer a roll call. Which connection broke first says little: giving up breaks more.

    Of the ranks that ask, the first one calls and the others wait for what it finds; where it is lost before that,
    another calls anew. Nothing, where that has happened again and again.
    """
    for call in _calls():
        store.set(f"{call}/{rank}", "")
        if store.add(call, 1) == 1:
            lost = _unanswering(store, call, range(size))
            store.set(f"{call}/lost", json.dumps(lost))
            return lost
        deadline = time.monotonic() + 2 * _ANSWERED_IN * _LOOK_S
        while time.monotonic() < deadline:
            if store.check([f"{call}/lost"]):
                found: list[int] = json.loads(store.get(f"{call}/lost"))
                return found
            time.sleep(_LOOK_S / 2)
    return []


def _calls() -> Iterator[str]:
    """The key of each roll call, which exists once somebody calls; an answer's is below it."""
    return (f"roll-call/{number}" for number in range(_CALLS))


def _unanswering(store: Store, call: str, ranks: range) -> list[int]:
    deadline = time.monotonic() + _ANSWERED_IN * _LOOK_S
    while not _answered(store, call, ranks) and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 5)
    return _absent(store, call, ranks)


def _absent(store: Store, call: str, ranks: range) -> list[int]:
    """Those of ``ranks`` that have not answered, by halves: one request where all have, a few more for each other."""
    if _answered(store, call, ranks):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return _absent(store, call, ranks[:half]) + _absent(store, call, ranks[half:])


def _answered(store: Store, call: str, ranks: range) -> bool:
    """Whether all of them have; one request."""
    return store.check([f"{call}/{rank}" for rank in ranks])
