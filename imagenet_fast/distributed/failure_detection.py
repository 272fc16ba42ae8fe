"""How the loss of a rank is noticed, and by which name it is called."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.heartbeat import describe_lost, published
from imagenet_fast.distributed.presence import absent, present
from imagenet_fast.errors import JobAborted, UserError

LOOK_S = 0.5  # between two looks whether somebody calls the roll, or what came of it
_ANSWERED_IN = 4  # such looks
_AGREED_IN = 20
_CALLS = 3  # at most: another one only where the rank that called was lost before it knew
_BELL = "bell"
_FAILURE = "failure"


class PeerLost(RuntimeError):
    """A rank that closed its connection, or did not answer in time."""

    def __init__(self, rank: int, cause: Exception) -> None:
        fate = "did not answer in time" if "imed out" in str(cause) else "closed its connection"
        super().__init__(f"rank {rank} {fate} during an all-reduce; its own log says why")
        self.rank = rank


def report_failure(error: Exception) -> str:
    """Why the ranks end, in a sentence, left for the others in the store they met at: the first one that was left.

    Where the error is a broken connection, the sentence names the ranks that were lost, and where they were last.
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
        except dist.DistError:  # whoever held the store is lost, too
            if broken:
                messages.append(f"rank {rank} lost others, and the store of all, which could name them, has ended")

    agreeing = threading.Thread(target=agree, daemon=True)  # the store's machine may be gone, and slow to say so
    agreeing.start()
    agreeing.join(_AGREED_IN * LOOK_S)
    return messages[-1]


def leave_failure(store: Store, message: str) -> str:
    """Tell all ranks why they must end; the first reason that was left."""
    first = store.compare_set(_FAILURE, "", message).decode()
    store.set(_BELL, "")
    return first


def reported_failure() -> str:
    """What :func:`report_failure` left, or nothing."""
    with suppress(dist.DistError):
        return failure_in(dist.distributed_c10d._get_default_store())
    return ""


def failure_in(store: Store) -> str:
    """Why all ranks must end, if somebody has said so."""
    return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""


def is_broken_connection(error: Exception) -> bool:
    """Whether a backend, or a collective of ours, could not reach another rank."""
    error = _first_cause(error)
    backend = any(name in str(error) for name in ("gloo", "Gloo", "NCCL", "Connection"))
    return isinstance(error, PeerLost | dist.DistError) or (isinstance(error, RuntimeError) and backend)


def _first_cause(error: Exception) -> Exception:
    """Of an error that was raised from another, as torch's pipelines do."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def find_lost_ranks(store: Store, rank: int, size: int) -> list[int]:
    """The ranks that do not answer a roll call. Which connection broke first says little: giving up breaks more.

    Of the ranks that ask, the first one calls and the others wait for what it finds; where it is lost before that,
    another calls anew. Nothing, where that has happened again and again.
    """
    for call in calls():
        store.set(f"{call}/{rank}", "")
        if store.add(call, 1) == 1:
            store.set(_BELL, "")
            lost = _unanswering(store, call, range(size))
            store.set(f"{call}/lost", json.dumps(lost))
            return lost
        deadline = time.monotonic() + 2 * _ANSWERED_IN * LOOK_S
        while time.monotonic() < deadline:
            if store.check([f"{call}/lost"]):
                found: list[int] = json.loads(store.get(f"{call}/lost"))
                return found
            time.sleep(LOOK_S / 2)
    return []


def has_rung(store: Store) -> bool:
    """Whether there is anything to be answered: a call, or a failure."""
    return store.check([_BELL])


def calls() -> Iterator[str]:
    """The key of each roll call, which exists once somebody calls; an answer's is below it."""
    return (f"roll-call/{number}" for number in range(_CALLS))


def answer(store: Store, rank: int, call: str) -> bool:
    """Say that ``rank`` is here, if it has been called."""
    if not store.check([call]):
        return False
    store.set(f"{call}/{rank}", "")
    return True


def excuse(store: Store, rank: int) -> None:
    """``rank`` ends in order: it will not be missed at any call to come."""
    for call in calls():
        store.set(f"{call}/{rank}", "")


def _unanswering(store: Store, call: str, ranks: range) -> list[int]:
    deadline = time.monotonic() + _ANSWERED_IN * LOOK_S
    while not present(store, call, ranks) and time.monotonic() < deadline:
        time.sleep(LOOK_S / 5)
    return absent(store, call, ranks)
