"""Processes forked from a server that has imported torch once; each importing it for itself would take seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver


def start_fork_server(module: str) -> None:
    """Have ``module`` imported by the server behind multiprocessing's start method "forkserver".

    Neither it nor what it forks hears Ctrl-C, which is for the starter to answer: Python has it deaf only once the
    import is over. Call this in the main thread, before the first process is started.
    """
    multiprocessing.set_forkserver_preload([module])
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, answer)


def end_with_starter() -> None:
    """Have this process end when the one that asked for it has ended, however that was.

    The kernel and torch's own data workers would watch the parent, which is the server; and that lives on for as long
    as any of its children.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
