"""End a process on a signal, even a rank that may be stuck inside a collective."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from imagenet_fast.distributed.board import call_within

GRACE_S = 3.0
"""Seconds that a rank has to end after a signal before it is forced to."""

_TWICE_S = 1.0  # signals closer together count as one: a terminal and torchrun both send a rank the same one

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a command or a rank."""


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on the first SIGINT, SIGTERM, SIGHUP or SIGUSR1; ignore later ones.

    A signal that is already ignored stays ignored, such as SIGHUP under nohup.
    """
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM, SIGHUP and SIGUSR1 from now on."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


class Signals:
    """Signal handlers of a rank: a signal raises KeyboardInterrupt, and ends the rank within ``GRACE_S`` seconds.

    After ``ask_first`` the first signal only asks the rank to stop, within ``saving_s`` seconds; the next one ends it.
    A thread ends a rank that is still running after its time, with the exit code that ``late`` returns.

    A rank that waits inside a collective runs no Python, and so no Python signal handler. The thread sees the signal
    all the same, since it reads the interpreter's wake-up pipe.
    """

    def __init__(self, saving_s: float = GRACE_S, late: Callable[[], int] = lambda: 1) -> None:
        """Install the handlers and start the thread.

        A signal that is already ignored stays ignored, such as SIGHUP under nohup.
        """
        self._saving_s = saving_s
        self._late = late
        self._asking = self._heard = False
        self._asked_at: float | None = None
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        self._answered = tuple(number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN)
        for number in self._answered:
            signal.signal(number, self._answer)
        threading.Thread(target=self._watch, args=(readable,), daemon=True).start()

    def ask_first(self) -> Callable[[], bool]:
        """Let the first signal only ask this rank to stop; return a function that reports whether it has."""
        self._asking = True
        return lambda: self._heard

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        now = time.monotonic()
        if self._asking and self._asked_at is None:
            self._asked_at, self._heard = now, True
        elif self._asked_at is None or now - self._asked_at > _TWICE_S:
            _interrupt(number, frame)

    def _watch(self, readable: int) -> NoReturn:
        """Handle signals in a thread, from the bytes of the pipe, as the main thread may be stuck."""
        asked_at, deadline = None, math.inf
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([readable], [], [], None if left == math.inf else left)[0]:
                break
            if not set(os.read(readable, 64)) & {*self._answered}:
                continue
            now = time.monotonic()
            if self._asking and asked_at is None:
                asked_at, deadline, self._heard = now, now + self._saving_s, True
            elif asked_at is None or now - asked_at > _TWICE_S:
                deadline = min(deadline, now + GRACE_S)
        code = call_within(GRACE_S, self._late)  # a disk that hangs must not keep the process
        os._exit(1 if code is None else code)


@contextmanager
def stopping_early() -> Iterator[None]:
    """Handle a signal before there are ranks, in a command that starts or resumes a run.

    Print that nothing is lost.

    Raises:
        SystemExit: With the exit code of a stop without loss.
    """
    before = {number: answer for number in ENDS if (answer := signal.getsignal(number)) is not None}
    interrupt_on_signals()
    try:
        yield
    except KeyboardInterrupt:
        from imagenet_fast.run.result import NOT_BEGUN, STOPPED

        print(NOT_BEGUN, flush=True)
        raise SystemExit(STOPPED) from None
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


def _interrupt(number: int, frame: FrameType | None) -> None:
    ignore_signals()  # a second signal must not interrupt the handling of the first
    raise KeyboardInterrupt
