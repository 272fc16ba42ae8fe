"""A thread that watches this rank while its training thread may be stuck.

It publishes the rank's heartbeat, and ends the process with a reason if the rank hangs or another one has failed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.failure_detection import (
    LOOK_S,
    failure_in,
    failure_of_others,
    find_lost_ranks,
    is_broken_connection,
    leave_failure,
    report_failure,
)  # fmt: skip
from imagenet_fast.distributed.flight_recorder import write_flight_record
from imagenet_fast.distributed.heartbeat import Heartbeat, describe_hang, describe_lost, here, publish, published
from imagenet_fast.distributed.process_groups import set_group_timeouts
from imagenet_fast.distributed.stragglers import Stragglers
from imagenet_fast.errors import JobAborted
from imagenet_fast.recipe.schema import Timeout

_PUBLISHED_S = 1.0  # maximum age of this rank's position as published to other ranks
_SLEPT = 4  # in looks: longest gap that counts; in a longer one the job may have been suspended (Ctrl-Z, or its node)
_GRACE_S = 5.0  # for a rank to end by itself and write its outcome after another rank has failed


class Watchdog:
    """The watchdog of one rank."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: Timeout, end: Callable[[str], None],
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Publish the rank's position for the first time.

        Args:
            store: Store of all ranks. It must be a client of the watchdog's own.
            rank: Rank to watch.
            size: Number of ranks.
            timeout: How long the rank may make no progress.
            end: Called with the reason if the rank must end and cannot end by itself.
            folder: Where to publish the rank's position for the launcher of this node; None for nowhere.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._end = end
        self._folder = folder
        self._host = socket.gethostname()
        self._seen = here.at
        self._stuck_s = 0.0
        self._unpublished_s = 0.0
        self._failed_s = 0.0
        self._limited_s = 0.0
        self._beats = 0
        self._stragglers = Stragglers(store, size) if rank == 0 else None
        self.publish()

    def tick(self, passed_s: float) -> None:
        """Do what is due, ``passed_s`` seconds after the last tick.

        Set the time limits of process groups, look for a failure, publish the heartbeat, and on rank 0 look for
        stragglers.

        Raises:
            SystemExit: If the rank must end.
        """
        before, self._seen = self._seen, here.at
        moved = before is not self._seen
        self._stuck_s = 0.0 if moved else self._stuck_s + passed_s
        self._unpublished_s += passed_s
        limit_s = self._timeout.first_step_s if here.fresh else self._timeout.step_s
        if limit_s != self._limited_s:
            set_group_timeouts(limit_s)
            self._limited_s = limit_s
        try:
            if failure := failure_in(self._store):
                self._failed_s += passed_s
                if self._failed_s > _GRACE_S:
                    self._leave_for(failure)
            started = self._seen[0] and not before[0]
            if started or self._unpublished_s >= _PUBLISHED_S:
                self.publish()  # the first step at once: a rank that is lost in it was not lost before it
            if self._stragglers is not None:
                self._stragglers.look(passed_s)
        except dist.DistError:  # the store ended with the rank or the launcher that held it
            pass
        if self._stuck_s > limit_s:
            self._abort()

    def publish(self, ended: bool = False) -> None:
        """Publish this rank's heartbeat for other ranks, the last one if it has ``ended`` in order."""
        self._unpublished_s = 0.0
        self._beats += 1
        publish(self._store, self._rank, replace(self._heartbeat(), beat=self._beats, ended=ended), self._folder)

    def deregister(self) -> None:
        """Record that the rank ends in order, so that it is not found lost."""
        with suppress(dist.DistError):
            self.publish(ended=True)

    def _heartbeat(self) -> Heartbeat:
        step, phase = self._seen
        return Heartbeat(self._host, step, phase, round(self._stuck_s, 1), *here.pace)

    def _abort(self) -> NoReturn:
        """End this rank, which has made no progress for too long, and report which ranks are to blame."""
        setting = "timeout.first_step_s" if here.fresh else "timeout.step_s"
        own = self._heartbeat()
        try:
            first = failure_of_others(self._store, self._sleep)
            if not first:
                others = [rank for rank in range(self._size) if rank != self._rank]
                lost = find_lost_ranks(self._store, others, self._sleep)
                known = published(self._store, range(self._size))
                sentence = describe_lost(lost, known) if lost else describe_hang(known, setting)
                first = leave_failure(self._store, sentence)
                if first == sentence:
                    print(f"error: {sentence}", file=sys.stderr, flush=True)
        except dist.DistError:
            alone = describe_hang({self._rank: own}, setting)
            first = f"{alone}; the store of all ranks, which could name others, has ended"
        self._leave_for(first)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.publish()  # other ranks look whose heart beats, too

    def _leave_for(self, sentence: str) -> NoReturn:
        def end() -> None:
            try:
                self._end(sentence)
            finally:
                write_flight_record(self._rank)

        ending = threading.Thread(target=end, daemon=True)  # a disk that hangs must not keep the process alive
        ending.start()
        ending.join(_GRACE_S)
        raise SystemExit(1)


@contextmanager
def watching_ranks(
    timeout: Timeout | None = None, end: Callable[[str], None] = lambda sentence: None, folder: Path | None = None
) -> Iterator[None]:
    """Run a watchdog thread for this rank of the default process group, which may be stuck in a collective.

    The thread publishes a heartbeat every second. It ends the process with exit code 1 in two cases: the rank makes no
    progress for longer than ``timeout`` allows, or it does not end by itself after another rank has failed.

    The thread ends with the block: a thread that returned from the store while Python shuts down would abort the
    process.

    Args:
        timeout: How long the rank may make no progress; None for the defaults.
        end: Called with the reason before the thread ends the process.
        folder: Where to publish the rank's position for the launcher of this node; None for nowhere.

    Raises:
        JobAborted: Instead of an error that only reports that another rank is gone.
    """
    leaving = threading.Event()
    store = dist.distributed_c10d._get_default_store().clone()  # a client of its own: another one may be blocked
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), timeout or Timeout(), end, folder)

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
        if is_broken_connection(error) and not reason.startswith(f"rank {dist.get_rank()}: "):
            raise JobAborted(reason) from None
        raise
    finally:
        leaving.set()
        thread.join(2 * LOOK_S)  # no longer: the store may be gone, and its client slow to raise
        if in_order and not thread.is_alive():
            watchdog.deregister()
