"""Leaving a process that has imported torch."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(end: SystemExit) -> NoReturn:
    """Exit as ``end`` says, but leave the memory to the kernel: Python takes a second to take torch apart.

    What is registered to be done at exit is done, such as giving back the semaphores of data workers.
    """
    if "torch" not in sys.modules or isinstance(end.code, str):
        raise end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads
            stream.flush()
    os._exit(end.code or 0)
