"""Detect lost ranks, and report the same failure on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.heartbeat import describe_lost, published
from imagenet_fast.distributed.store import wait_until
from imagenet_fast.errors import JobAborted, UserError

LOOK_S = 0.5  # between two looks at heartbeats or for a failure
_SILENT_IN = 6  # in looks: a rank without a heartbeat for so long is lost; healthy ones have one every second look
_FOUND_IN = 2 * _SILENT_IN - 2  # in looks: how long others wait for the rank that searches
_AGREED_IN = 20
_FAILURE, _SEARCH = "failure", "search"


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
    the sentence names the lost ranks and their last positions. This takes at most 10 s.
    """
    rank, error = dist.get_rank(), _first_cause(error)
    messages = [
        str(error) if isinstance(error, JobAborted | UserError) else f"rank {rank}: {type(error).__name__}: {error}"
    ]

    def agree() -> None:
        broken = is_broken_connection(error)
        try:
            store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
            if broken and not failure_of_others(store):
                lost = find_lost_ranks(store, [other for other in range(size) if other != rank])
                if lost:
                    messages.append(describe_lost(lost, published(store, range(size))))
            messages.append(leave_failure(store, messages[-1]))
        except dist.DistError:  # the process that held the store is lost, too
            if broken:
                messages.append(f"rank {rank} lost others, and the store of all, which could name them, has ended")

    agreeing = threading.Thread(target=agree, daemon=True)  # the store's node may be gone, and the client slow to raise
    agreeing.start()
    agreeing.join(_AGREED_IN * LOOK_S)
    return messages[-1]


def failure_of_others(store: Store, sleep: Callable[[float], object] = time.sleep) -> str:
    """Return the failure that another rank reported, or an empty string if this rank must find the lost ranks.

    One rank looks, and the others wait here for what it leaves. If it is lost before, each looks by itself.

    Args:
        store: Store of all ranks.
        sleep: Waits for some seconds.
    """
    if store.add(_SEARCH, 1) > 1:
        wait_until(lambda: failure_in(store) != "", time.monotonic() + _FOUND_IN * LOOK_S, LOOK_S / 2, sleep=sleep)
    return failure_in(store)


def find_lost_ranks(store: Store, ranks: Sequence[int], sleep: Callable[[float], object] = time.sleep) -> list[int]:
    """Return those of ``ranks`` that have not ended in order, and publish no heartbeat within 3 s.

    Which connection broke first says little: a rank that gives up breaks more connections. Clocks need not agree: a
    heartbeat is new if it differs from the one before.

    Args:
        store: Store of all ranks.
        ranks: The ranks to look for, without the one that asks.
        sleep: Waits for some seconds.
    """
    before = published(store, ranks)
    silent = [rank for rank in ranks if rank not in before or not before[rank].ended]

    def all_heard() -> bool:
        now = published(store, silent)
        silent[:] = [rank for rank in silent if rank not in now or now[rank] == before.get(rank)]
        return not silent

    wait_until(all_heard, time.monotonic() + _SILENT_IN * LOOK_S, LOOK_S, sleep=sleep)
    return silent


def leave_failure(store: Store, message: str) -> str:
    """Publish ``message`` as the reason why all ranks must end; return the first reason that any rank published."""
    text = message.encode(errors="backslashreplace").decode()  # a path in it may not be UTF-8
    return store.compare_set(_FAILURE, "", text).decode()


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
