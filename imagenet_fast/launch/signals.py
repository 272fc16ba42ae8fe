"""An end that was asked for by a signal, also in a rank that may be stuck inside a collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

GRACE_S = 3.0
"""How long a rank may take to end after a signal before it is made to."""

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_signals() -> None:
    """The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in this process; those after it are ignored.

    What is ignored already stays so, as SIGHUP under nohup does.
    """
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def end_on_signals() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt in this rank, and end it within ``GRACE_S`` seconds at most.

    A rank that waits inside a collective runs no Python, hence no Python signal handler; a thread that reads
    the interpreter's wake-up pipe sees the signal all the same.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    threading.Thread(target=_end_after_signal, args=(readable,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ignored in _ENDS:  # once is enough: what follows must not be interrupted again
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_after_signal(readable: int) -> None:
    while not set(os.read(readable, 1)) & {signal.SIGINT, signal.SIGTERM}:
        pass
    time.sleep(GRACE_S)
    os._exit(1)
