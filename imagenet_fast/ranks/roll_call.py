"""How the loss of a rank is noticed, and by which name it is called."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_ROLL_CALL_S = 0.5  # between two looks whether somebody calls the roll


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
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    leaving = threading.Event()

    def listen() -> None:
        with suppress(dist.DistError):
            while not leaving.wait(_ROLL_CALL_S):
                if store.check(["roll-call"]):
                    store.set(f"here/{rank}", "")
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join(2 * _ROLL_CALL_S)  # no longer: the store may be gone, and slow to say so


def report_failure(error: Exception) -> str:
    """Why this rank ends, in a sentence, left for the other ranks in the store they met at; the first one stays.

    Where the error is a broken connection, the sentence names the ranks that were lost.
    """
    rank = dist.get_rank()
    message = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if _is_broken_connection(error):
            lost = _lost_ranks(store, rank, dist.get_world_size())
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


def _lost_ranks(store: Store, rank: int, size: int) -> list[int]:
    """The ranks that do not answer a roll call. Which connection broke first says little: giving up breaks more."""
    store.set("roll-call", "")
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + 4 * _ROLL_CALL_S
    while True:
        lost = [other for other in range(size) if not store.check([f"here/{other}"])]
        if not lost or time.monotonic() > deadline:
            return lost
        time.sleep(0.05)
