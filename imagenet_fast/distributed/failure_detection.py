"""Detect lost ranks, and report the same failure on all ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.heartbeat import describe_lost, published
from imagenet_fast.distributed.store import absent, present, wait_until
from imagenet_fast.errors import JobAborted, UserError

LOOK_S = 0.5  # between two looks for a roll call or its result
_ANSWERED_IN = 4  # in looks: how long the calling rank waits for answers to a roll call
_AGREED_IN = 20
_CALLS = 3  # at most: another call is made only if the calling rank was lost before it had a result
_BELL = "bell"
_FAILURE = "failure"


class PeerLost(RuntimeError):
    """A rank that closed its connection, or did not answer in time."""

    def __init__(self, rank: int, cause: Exception) -> None:
        """Describe how ``rank`` was lost, from the error ``cause`` of the connection to it."""
        fate = "did not answer in time" if "imed out" in str(cause) else "closed its connection"
        super().__init__(f"rank {rank} {fate} during an all-reduce; its own log says why")
        self.rank = rank


def report_failure(error: Exception) -> str:
    """Return why all ranks end, in one sentence, and leave it in the default store for other ranks.

    If another rank has left a reason before, that one is returned: the first wins. If ``error`` is a broken connection,
    the sentence names the lost ranks and their last positions. The search and the report take at most 10 s.
    """
    rank, error = dist.get_rank(), _first_cause(error)
    messages = [
        str(error) if isinstance(error, JobAborted | UserError) else f"rank {rank}: {type(error).__name__}: {error}"
    ]

    def agree() -> None:
        broken = is_broken_connection(error)
        try:
            store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
            if broken and (lost := find_lost_ranks(store, rank, size)):
                messages.append(describe_lost(lost, published(store, range(size))))
            messages.append(leave_failure(store, messages[-1]))
        except dist.DistError:  # the process that held the store is lost, too
            if broken:
                messages.append(f"rank {rank} lost others, and the store of all, which could name them, has ended")

    agreeing = threading.Thread(target=agree, daemon=True)  # the store's node may be gone, and the client slow to raise
    agreeing.start()
    agreeing.join(_AGREED_IN * LOOK_S)
    return messages[-1]


def leave_failure(store: Store, message: str) -> str:
    """Publish ``message`` as the reason why all ranks must end; return the first reason that any rank published."""
    first = store.compare_set(_FAILURE, "", message).decode()
    store.set(_BELL, "")
    return first


def reported_failure() -> str:
    """Return the reason that ``report_failure`` left in the default store, or an empty string."""
    with suppress(dist.DistError):
        return failure_in(dist.distributed_c10d._get_default_store())
    return ""


def failure_in(store: Store) -> str:
    """Return the reason in ``store`` why all ranks must end, or an empty string."""
    return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""


def is_broken_connection(error: Exception) -> bool:
    """Return whether ``error`` means that a backend, or a collective of ours, could not reach another rank."""
    error = _first_cause(error)
    backend = any(name in str(error) for name in ("gloo", "Gloo", "NCCL", "Connection"))
    return isinstance(error, PeerLost | dist.DistError) or (isinstance(error, RuntimeError) and backend)


def _first_cause(error: Exception) -> Exception:
    """Return the first error of a chain of errors raised from one another, as torch's pipelines raise them."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def find_lost_ranks(store: Store, rank: int, size: int) -> list[int]:
    """Return the ranks that do not answer a roll call.

    Which connection broke first says little: a rank that gives up breaks more connections. The first rank that asks
    makes the call, and the others wait for its result. If that rank is lost before it has a result, another one makes
    the next call. Return an empty list if the caller was lost in each of the three calls.
    """
    for call in calls():
        store.set(f"{call}/{rank}", "")
        if store.add(call, 1) == 1:
            store.set(_BELL, "")
            lost = _unanswering(store, call, range(size))
            store.set(f"{call}/lost", json.dumps(lost))
            return lost
        result = f"{call}/lost"
        if wait_until(partial(store.check, [result]), time.monotonic() + 2 * _ANSWERED_IN * LOOK_S, LOOK_S / 2):
            found: list[int] = json.loads(store.get(result))
            return found
    return []


def has_rung(store: Store) -> bool:
    """Return whether there is a roll call or a failure to handle."""
    return store.check([_BELL])


def calls() -> Iterator[str]:
    """Return the keys of the roll calls.

    A key exists once a rank makes the call. Rank ``r`` answers by setting ``key/r``.
    """
    return (f"roll-call/{number}" for number in range(_CALLS))


def answer(store: Store, rank: int, call: str) -> bool:
    """Answer for ``rank`` if the roll call ``call`` was made; return whether it was."""
    if not store.check([call]):
        return False
    store.set(f"{call}/{rank}", "")
    return True


def excuse(store: Store, rank: int) -> None:
    """Answer all roll calls in advance, as ``rank`` ends in order."""
    for call in calls():
        store.set(f"{call}/{rank}", "")


def _unanswering(store: Store, call: str, ranks: range) -> list[int]:
    """Return the ranks that have not answered the roll call ``call`` within 2 s."""
    wait_until(partial(present, store, call, ranks), time.monotonic() + _ANSWERED_IN * LOOK_S, LOOK_S / 5)
    return absent(store, call, ranks)
