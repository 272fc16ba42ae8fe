"""Processes forked from a server that has imported torch once; importing it in each process would take seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

_LOOK_S = 0.5
_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_fork_server(module: str) -> None:
    """Have the server behind multiprocessing's start method "forkserver" import ``module``.

    The server and its forks ignore the signals that stop a whole process group; the starter handles them. Python's own
    server ignores only one of them, and only once the import is done. Call this in the main thread, before the first
    process is started.
    """
    multiprocessing.set_forkserver_preload([module])
    answers = {number: signal.signal(number, signal.SIG_IGN) for number in _TO_STOP}
    try:
        forkserver.ensure_running()
    finally:
        for number, answer in answers.items():
            signal.signal(number, answer)


def end_with_parent(parent: int) -> None:
    """Make this process end, with exit code 1, within a second after ``parent`` has ended for any reason.

    Args:
        parent: Process id of what has started this process. It may have ended already.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_starter() -> None:
    """Make this forked process end, with exit code 1, when the process that asked for it has ended for any reason.

    The kernel and torch's own data workers would watch the parent, which is the fork server; it runs as long as any of
    its children. SIGTERM to this process ends it, but a signal to the starter's process group does not reach it.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def freeze_gc() -> None:
    """Exclude all objects that are alive now from future garbage collections.

    torch and a model are about half a million objects; a collection of all of them takes 0.1 to 0.4 s. Each rank would
    run it in a different step, in which all others wait. Objects created later are still collected, in little time.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def unfreezing_gc() -> Iterator[None]:
    """Undo every ``freeze_gc`` at the end of the block, so that what lived in it can be collected."""
    try:
        yield
    finally:
        gc.unfreeze()
