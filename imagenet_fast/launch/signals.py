"""An end that was asked for by a signal, also in a rank that may be stuck inside a collective."""

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

GRACE_S = 3.0
"""How long a rank may take to end after a signal before it is made to."""

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

    After :meth:`ask_first` the first one only asks, and the rank has ``saving_s`` seconds; the next one ends it. A rank
    that is still there when its time is up is ended by a thread, with the exit code that ``late`` returns.

    A rank that waits inside a collective runs no Python, hence no Python signal handler; a thread that reads
    the interpreter's wake-up pipe sees the signal all the same.
    """

    def __init__(self, saving_s: float, late: Callable[[], int]) -> None:
        self._saving_s = saving_s
        self._late = late
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
                asked_at, deadline = now, now + self._saving_s
            elif asked_at is None or now - asked_at > _TWICE_S:
                deadline = min(deadline, now + GRACE_S)
        self._end()

    def _end(self) -> NoReturn:
        code = [1]

        def tell() -> None:
            code[:] = [self._late()]

        telling = threading.Thread(target=tell, daemon=True)  # a disk that hangs must not keep the rank
        telling.start()
        telling.join(GRACE_S)
        os._exit(code[0])


def end_on_signals(saving_s: float = GRACE_S, late: Callable[[], int] = lambda: 1) -> Signals:
    """Have this rank answer SIGINT, SIGTERM, SIGHUP and SIGUSR1; what is ignored stays so, as SIGHUP under nohup."""
    return Signals(saving_s, late)


@contextmanager
def stopping_early() -> Iterator[None]:
    """Of a command that begins or goes on with a run: a signal before there are ranks ends it, in a sentence, by
    SystemExit with the exit code of a stop without loss."""
    before = {number: answer for number in _ENDS if (answer := signal.getsignal(number)) is not None}
    interrupt_on_signals()
    try:
        yield
    except KeyboardInterrupt:
        from imagenet_fast.metrics.run_result import NOTHING_LOST, STOPPED

        print(NOTHING_LOST, flush=True)
        raise SystemExit(STOPPED) from None
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ignored in _ENDS:  # once is enough: what follows must not be interrupted again
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt
