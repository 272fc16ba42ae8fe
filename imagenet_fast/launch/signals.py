"""An end that was asked for by a signal, also in a rank that may be stuck inside a collective."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

GRACE_S = 3.0
"""How long a rank may take to end after a signal before it is made to."""

SAVING_S = 20.0
"""How long it may take where the signal asks it to save first."""

_TWICE_S = 1.0  # signals closer together are one: a terminal and torchrun both pass on what was meant for a rank

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def interrupt_on_signals() -> None:
    """The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 raises KeyboardInterrupt in this process; later ones are ignored.

    What is ignored already stays so, as SIGHUP under nohup does.
    """
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


class Signals:
    """What signals do to a rank: they raise KeyboardInterrupt, and end it within ``GRACE_S`` seconds at most.

    After :meth:`ask_first` the first one only asks, and the rank has ``SAVING_S`` seconds; the next one ends it.

    A rank that waits inside a collective runs no Python, hence no Python signal handler; a thread that reads
    the interpreter's wake-up pipe sees the signal all the same.
    """

    def __init__(self) -> None:
        self._asking = False
        self._asked_at: float | None = None
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        self._answered = tuple(number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN)
        for number in self._answered:
            signal.signal(number, self._answer)
        threading.Thread(target=self._watch, args=(readable,), daemon=True).start()

    def ask_first(self) -> Callable[[], bool]:
        """From now on; returns what tells whether this rank has been asked to stop."""
        self._asking = True
        return lambda: self._asked_at is not None

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """In the main thread."""
        now = time.monotonic()
        if self._asking and self._asked_at is None:
            self._asked_at = now
        elif self._asked_at is None or now - self._asked_at > _TWICE_S:
            _interrupt(number, frame)

    def _watch(self, readable: int) -> None:
        """In a thread: the same by the bytes of the pipe, as the main thread may be deaf."""
        asked_at, deadline = None, math.inf
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([readable], [], [], None if left == math.inf else left)[0]:
                break
            if not set(os.read(readable, 64)) & {*self._answered}:
                continue
            now = time.monotonic()
            if self._asking and asked_at is None:
                asked_at, deadline = now, now + SAVING_S
            elif asked_at is None or now - asked_at > _TWICE_S:
                deadline = min(deadline, now + GRACE_S)
        os._exit(1)


def end_on_signals() -> Signals:
    """Have this rank answer SIGINT, SIGTERM, SIGHUP and SIGUSR1; what is ignored stays so, as SIGHUP under nohup."""
    return Signals()


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ignored in _ENDS:  # once is enough: what follows must not be interrupted again
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt
