"""Agree after which step all ranks do what one of them wishes: save, or stop.

Hosts of GPUs run ahead of one another, so no rank knows how far the others have come. A rank that hears of a wish says
how far it goes at most without an answer, and the furthest of these steps is the answer. A thread of each rank does
this on the board, twice a second. So no collective is issued, and the training thread only looks at variables.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import torch.distributed as dist

from imagenet_fast.distributed.board import Board, background_client
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.ranks import RankInfo

_LOOK_S = 0.5  # between two looks at the board
_AHEAD_S = 1.0  # of steps that a rank may take until it hears the answer
_runs = count()  # of agreements in this process, of which each has a part of the board


class _Leaving(Exception):
    """The agreement is closed."""


class StepAgreement:
    """After which steps all ranks do what one of them wishes.

    ``due`` returns the same for the same step on every rank. A wish is due in about two seconds, or after the step that
    is being taken if that takes longer. One rank alone does at once what it wishes.
    """

    def __init__(self, place: RankInfo, step: int, wishes: Callable[[], set[str]]) -> None:
        """Begin after ``step``; every rank must make as many agreements.

        Args:
            place: This rank.
            step: Steps taken so far.
            wishes: Returns what this rank wishes now; called in a thread. What is under way is not wished again.
        """
        self._place = place
        self._step = step
        self._wishes = wishes
        self._limit = math.inf  # step that this rank does not pass before it hears the answer
        self._due = defaultdict[int, set[str]](set)
        self._under_way: set[str] = set()
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        if place.size > 1:
            store = background_client(dist.distributed_c10d._get_default_store())
            self._board = Board(store, f"agreement/{next(_runs)}", self._pause)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def hears(self, wish: str) -> bool:
        """Return whether this rank has heard that any rank wishes this, and it is not yet done."""
        return wish in (self._under_way if self._thread else self._wishes())

    def due(self, step: int) -> set[str]:
        """Return what all ranks do after ``step``. Call it between any two steps."""
        if self._thread is None:
            return self._wishes()
        with self._changed:
            self._step = step
            if step >= self._limit:
                with here.waiting():
                    self._changed.wait_for(lambda: step < self._limit)
            due = self._due.pop(step, set())
            self._under_way -= due
            return due

    def close(self) -> None:
        """End the thread. No rank may be before its last step."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(2 * _LOOK_S)  # no longer: the store may be gone, and its client slow to raise

    def _watch(self) -> None:
        """Answer one wish after the other, until the agreement is closed or the store is gone."""
        with suppress(_Leaving, dist.DistError):
            for number in count():
                self._answer(f"{number}", *self._next_wish(f"{number}"))

    def _next_wish(self, number: str) -> tuple[str, float]:
        """Return the next wish of any rank, and how many steps this one takes meanwhile."""
        seen = deque([(time.monotonic(), self._step)], maxlen=2)
        while not (wish := self._board.read(f"{number}/wish")):
            if own := self._wishes() - self._under_way:
                wish = self._board.first(f"{number}/wish", min(own))
                break
            seen.append((time.monotonic(), self._step))
            self._pause(_LOOK_S)
        since, step = seen[0]
        return wish, (self._step - step) * _AHEAD_S / max(time.monotonic() - since, _LOOK_S)

    def _answer(self, number: str, wish: str, ahead: float) -> None:
        """Agree with the other ranks after which step the wish is due."""
        with self._changed:
            self._under_way.add(wish)
            self._limit = self._step + 1 + int(ahead)
        self._board.post(f"{number}/limit/{self._place.rank}", self._limit)
        if self._place.is_main:
            limits = self._board.gather(f"{number}/limit", range(self._place.size), math.inf)
            self._board.post(f"{number}/step", max(limits.values()))
        step = self._board.read(f"{number}/step", math.inf)
        with self._changed:
            self._due[step].add(wish)
            self._limit = math.inf
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        if self._leaving.wait(seconds):
            raise _Leaving
