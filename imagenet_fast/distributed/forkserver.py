"""Processes forked from a server that has imported torch once; each importing it for itself would take seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import forkserver

_LOOK_S = 0.5
_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_fork_server(module: str) -> None:
    """Have ``module`` imported by the server behind multiprocessing's start method "forkserver".

    Neither it nor what it forks hears the signals that ask a whole process group to stop, which are for the starter to
    answer: Python has it deaf to one of them, and only once the import is over. Call this in the main thread, before
    the first process is started.
    """
    multiprocessing.set_forkserver_preload([module])
    answers = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_STOP}
    try:
        forkserver.ensure_running()
    finally:
        for number, answer in answers.items():
            signal.signal(number, answer)


def end_with_parent() -> None:
    """Have this process end within a second when the one that has started it has ended, however that was."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_starter() -> None:
    """Have this process end when the one that asked for it has ended, however that was.

    The kernel and torch's own data workers would watch the parent, which is the server; and that lives on for as long
    as any of its children. It is told to end by SIGTERM, but not with its whole process group.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
