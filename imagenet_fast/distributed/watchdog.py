"""What becomes of a rank that is lost or stuck: who it is, one sentence for all ranks, and the end of each in time.

A thread publishes this rank's heartbeat while its training thread may be stuck, and ends the process with a reason if
the rank hangs or another one has failed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.board import Board, background_client, call_within
from imagenet_fast.distributed.cores import exceeded_limit
from imagenet_fast.distributed.groups import write_flight_record
from imagenet_fast.distributed.heartbeat import Heartbeat, describe_hang, describe_lost, here, publish, published
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.recipe.schema import Timeout

LOOK_S = 0.5  # between two looks for a failure
_SILENT_IN = 6  # in looks: a rank without a heartbeat for so long is lost; healthy ones have one every second look
_FOUND_IN = 2 * _SILENT_IN - 2  # in looks: how long others wait for the rank that searches
_AGREED_IN = 20  # in looks: how long it may take to look for lost ranks
_TOLD_S = 2.0  # to leave a reason in a store that may be gone
_SLEPT = 4  # in looks: longest gap that counts; in a longer one the job may have been suspended (Ctrl-Z, or its node)
_PUBLISHED_S = 1.0  # maximum age of this rank's position as published to other ranks
_GRACE_S = 5.0  # for a rank to end by itself and write its outcome after another rank has failed
_COMPARED_S = 10.0  # least time over which the paces of ranks are compared
_SLOW = 3.0  # times the median of all ranks


class PeerLost(RuntimeError):
    """A rank that closed its connection, or did not answer in time."""

    def __init__(self, rank: int, cause: Exception) -> None:
        """Describe how ``rank`` was lost, from the error ``cause`` of the connection to it."""
        fate = "did not answer in time" if "imed out" in str(cause) else "closed its connection"
        super().__init__(f"rank {rank} {fate} during an all-reduce; its own log says why")


class Reason(NamedTuple):
    """Why all ranks end. The first one that a rank posts holds for all."""

    message: str
    status: Literal["failed", "preempted", "interrupted"] = "failed"
    """How the run ends."""


def watch_board(store: Store | None = None, pause: Callable[[float], object] = time.sleep) -> Board:
    """Return the board of heartbeats and failures, in the default store or with a client of it."""
    return Board(store or dist.distributed_c10d._get_default_store(), "watch", pause)


class Paces:
    """Seconds that each rank takes for its own part of a step, compared every 10 seconds of training or so."""

    def __init__(self, ranks: int) -> None:
        """Compare this many ranks."""
        self._own_s, self._steps = torch.zeros(ranks, dtype=torch.float64), 0
        self._named: set[int] = set()

    def add(self, own_s: Tensor, steps: int) -> None:
        """Add each rank's seconds of ``steps`` steps, without waiting for others; warn of a slow rank, once."""
        self._own_s, self._steps = self._own_s + own_s, self._steps + steps
        if self._own_s.max() < _COMPARED_S:
            return
        step_s = self._own_s / self._steps
        self._own_s, self._steps = torch.zeros_like(step_s), 0
        slowest, usual_s = int(step_s.argmax()), float(step_s.quantile(0.5))
        if step_s[slowest] > _SLOW * usual_s and slowest not in self._named:
            self._named.add(slowest)
            host = "".join(f" on {at.host}" for at in published(watch_board(), [slowest]).values())
            warn(
                f"rank {slowest}{host} takes {step_s[slowest]:.2g} s for its own part of a step, where the median "
                f"of all ranks is {usual_s:.2g} s"
            )


def report_failure(error: Exception) -> Reason:
    """Return why all ranks end, in one sentence, and leave it in the default store for other ranks.

    If ``error`` is a broken connection, the sentence names the lost ranks and their last positions. The rest is as in
    ``first_reason``.
    """
    error = _first_cause(error)
    what = exceeded_limit(str(error)) or f"{type(error).__name__}: {error}"
    own = str(error) if isinstance(error, JobAborted | UserError) else f"rank {dist.get_rank()}: {what}"
    return first_reason(Reason(own), is_broken_connection(error))


def first_reason(own: Reason, broken: bool = False) -> Reason:
    """Return the first reason to end that any rank has left in the default store; if there is none, leave ``own``.

    If connections between ranks are ``broken``, lost ranks are looked for before, which takes at most 10 s.
    """

    def ask() -> Reason:
        board, rank, size = watch_board(), dist.get_rank(), dist.get_world_size()
        try:
            return find_culprit(board, rank, size, lambda _: own)[0] if broken else leave_failure(board, own)
        except dist.DistError:  # the process that held the store is lost, too
            gone = f"rank {rank} lost others, and the store of all, which could name them, has ended"
            return Reason(gone) if broken else own

    found = call_within(_AGREED_IN * LOOK_S if broken else _TOLD_S, ask) if dist.is_initialized() else None
    return found or own


def find_culprit(
    board: Board, rank: int, size: int, otherwise: Callable[[dict[int, Heartbeat]], Reason]
) -> tuple[Reason, bool]:
    """Agree with all ranks on why they end; return the reason, and whether it is this rank's.

    One rank looks who is lost, and the others wait here for what it leaves. If it is lost before, each looks by itself.
    If nobody is lost, the reason is what ``otherwise`` makes of all positions.
    """
    searches = board.count("search") == 1
    if found := board.read("failure", 0.0 if searches else time.monotonic() + _FOUND_IN * LOOK_S):
        return Reason(**found), False
    lost = find_lost_ranks(board, [other for other in range(size) if other != rank])
    known = published(board, range(size))
    own = Reason(describe_lost(lost, known)) if lost else otherwise(known)
    first = leave_failure(board, own)
    return first, first == own


def find_lost_ranks(board: Board, ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` that have not ended in order, and publish no heartbeat within 3 s.

    Which connection broke first says little: a rank that gives up breaks more connections. Clocks need not agree: a
    heartbeat is new if it differs from the one before.

    Args:
        board: Where the ranks publish.
        ranks: The ranks to look for, without the one that asks.
    """
    before = published(board, ranks)
    silent = [rank for rank in ranks if rank not in before or not before[rank].ended]
    for _ in range(_SILENT_IN):
        if not silent:
            break
        board.pause(LOOK_S)
        now = published(board, silent)
        silent = [rank for rank in silent if rank not in now or now[rank] == before.get(rank)]
    return silent


def leave_failure(board: Board, reason: Reason) -> Reason:
    """Publish why all ranks must end; return the first reason that any rank published."""
    text = reason.message.encode(errors="backslashreplace").decode()  # a path may not be UTF-8, and it is printed
    return Reason(**board.first("failure", reason._replace(message=text)._asdict()))


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


@dataclass
class Watchdog:
    """The watchdog of one rank; the arguments are those of ``watching_ranks``."""

    store: Store
    """A client of the watchdog's own: another one may be blocked."""
    rank: int
    size: int
    timeout: Timeout
    end: Callable[[Reason], int]
    file: Path | None = None
    traces: Path | None = None

    def __post_init__(self) -> None:
        """Publish the rank's position for the first time."""
        self._board = watch_board(self.store, self._publish_after)
        self._host = socket.gethostname()
        self._seen = here.at
        self._stuck_s = self._unpublished_s = self._failed_s = self._looked_s = 0.0
        self._known: dict[int, Heartbeat] = {}  # positions of all ranks when this one had been stuck for `_looked_s`
        self._beats = 0
        self.publish()

    def tick(self, passed_s: float) -> None:
        """Look for a failure, and publish the heartbeat, ``passed_s`` seconds after the last tick.

        Raises:
            SystemExit: If the rank must end.
        """
        before, self._seen = self._seen, here.at
        moved = before is not self._seen
        self._stuck_s = 0.0 if moved else self._stuck_s + passed_s
        self._known = {} if moved else self._known
        self._unpublished_s += passed_s
        limit_s = self.timeout.first_step_s if here.fresh else self.timeout.step_s
        try:
            if failure := self._board.read("failure"):
                self._failed_s += passed_s
                if self._failed_s > _GRACE_S:
                    self._leave_for(Reason(**failure))
            started = self._seen[0] and not before[0]
            if started or self._unpublished_s >= _PUBLISHED_S:
                self.publish()  # the first step at once: a rank that is lost in it was not lost before it
        except dist.DistError:  # the store ended with the rank or the launcher that held it
            pass
        if self._stuck_s > limit_s and (self._seen[1] != "sync" or self._waits_in_vain(limit_s)):
            self._abort()

    def publish(self, ended: bool = False) -> None:
        """Publish this rank's heartbeat; if it has ``ended`` in order, it is not found lost later."""
        self._unpublished_s = 0.0
        self._beats += 1
        publish(self._board, self.rank, replace(self._heartbeat(), beat=self._beats, ended=ended), self.file)

    def _waits_in_vain(self, limit_s: float) -> bool:
        """Return whether a rank is lost, or all wait for each other, as this one has in sync for longer than allowed.

        A rank that is elsewhere is alive as long as its heart beats: it ends by its own watchdog if it hangs.
        """
        if self._known and self._stuck_s < self._looked_s + _SILENT_IN * LOOK_S:
            return False
        try:
            before, self._known = self._known, published(self._board, range(self.size))
        except dist.DistError:  # nobody can be asked
            return True
        self._looked_s, now = self._stuck_s, self._known
        ranks = [rank for rank in range(self.size) if rank not in now or not now[rank].ended]
        silent = [rank for rank in ranks if before and now.get(rank) == before.get(rank)]
        lost = silent and find_lost_ranks(self._board, silent)  # not late only
        waiting = [rank for rank in ranks if rank in now and now[rank].phase == "sync" and now[rank].for_s > limit_s]
        return bool(lost) or waiting == ranks

    def _heartbeat(self) -> Heartbeat:
        step, phase = self._seen
        return Heartbeat(self._host, step, phase, round(self._stuck_s, 1))

    def _abort(self) -> NoReturn:
        """End this rank, which has made no progress for too long, and report which ranks are to blame."""
        setting = "timeout.first_step_s" if here.fresh else "timeout.step_s"
        try:
            first, ours = find_culprit(
                self._board, self.rank, self.size, lambda known: Reason(describe_hang(known, setting))
            )
            if ours:
                print(f"error: {first.message}", file=sys.stderr, flush=True)
        except dist.DistError:
            alone = describe_hang({self.rank: self._heartbeat()}, setting)
            first = Reason(f"{alone}; the store of all ranks, which could name others, has ended")
        self._leave_for(first)

    def _publish_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self.publish()  # other ranks look whose heart beats, too

    def _leave_for(self, reason: Reason) -> NoReturn:
        def end() -> int:
            try:
                return self.end(reason)
            finally:
                write_flight_record(self.rank, self.traces)

        code = call_within(_GRACE_S, end)
        raise SystemExit(1 if code is None else code)


@contextmanager
def watching_ranks(
    timeout: Timeout, end: Callable[[Reason], int], file: Path | None = None, traces: Path | None = None
) -> Iterator[None]:
    """Run a watchdog thread for this rank of the default process group, which may be stuck in a collective.

    The thread publishes a heartbeat every second. It ends the process in two cases: the rank makes no progress for
    longer than ``timeout`` allows, or it does not end by itself after another rank has ended all. A rank that waits for
    others is as alive as they are: it gives up if one is lost, or all wait for each other.

    The thread ends with the block: a thread that returned from the store while Python shuts down would abort the
    process.

    Args:
        timeout: How long the rank may make no progress.
        end: Called with the reason before the thread ends the process; returns the exit code.
        file: Where to publish the rank's position for the launcher of this node; None for nowhere.
        traces: Where to leave NCCL's last operations if the thread ends the process; None for nowhere.

    Raises:
        JobAborted: Instead of an error that only reports that another rank is gone.
    """
    leaving = threading.Event()
    store = background_client(dist.distributed_c10d._get_default_store())
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), timeout, end, file, traces)

    def watch() -> None:
        before = time.monotonic()
        try:
            while not leaving.wait(LOOK_S):
                now = time.monotonic()
                watchdog.tick(min(now - before, _SLEPT * LOOK_S))
                before = now
        except SystemExit as ended:
            os._exit(int(ended.code or 0))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    in_order = True
    try:
        yield
    except Exception as error:
        in_order = False
        reason = report_failure(error)
        if is_broken_connection(error) and not reason.message.startswith(f"rank {dist.get_rank()}: "):
            raise JobAborted(reason.message) from None
        raise
    finally:
        leaving.set()
        thread.join(2 * LOOK_S)  # no longer: the store may be gone, and its client slow to raise
        if in_order and not thread.is_alive():
            with suppress(dist.DistError):
                watchdog.publish(ended=True)
