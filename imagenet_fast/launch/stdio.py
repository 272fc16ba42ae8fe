"""stdout and stderr that never raise, whatever happens to their terminal, pipe or disk, and are UTF-8 in any locale.

Printed text is a report on the run, not its purpose. Without this module, a closed pipe (`| head`), a full disk or a
locale without "–" would raise in the middle of a run, in any line that prints.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from imagenet_fast.errors import exit_with_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_lost: OSError | None = None
"""The error that lost output, if any; a closed pipe does not count."""


class _Forgiving(io.FileIO):
    """A file descriptor on which writes always succeed: output that cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write ``data``; return the number of bytes written or dropped."""
        global _lost
        try:
            while (written := super().write(data)) is None:  # another program has made the pipe non-blocking
                select.select([], [self], [])
        except OSError as error:
            if error.errno != errno.EPIPE:
                _lost = error
            return memoryview(data).nbytes
        return written


def keep_printing() -> None:
    """Make prints to stdout and stderr never raise. Call this once, at the start of a process."""
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def refuse_if_lost() -> None:
    """Exit with code 2 and a message if output to stdout or stderr was lost.

    This is for commands whose result is their output. A closed pipe, as of `head`, is no error.
    """
    sys.stdout.flush()
    if _lost is not None:
        exit_with_error(
            f"the output could not be written ({_lost.strerror}); see to where it goes, and run the command again"
        )


def _forgiving(stream: TextIO | None, number: int) -> TextIO:
    """Return the replacement of ``stream``, which writes to file descriptor ``number``; None: it was closed."""
    if stream is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # so that no file of the run gets that number
        return os.fdopen(number, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):  # the output is captured
        return stream
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_Forgiving(number, "w", closefd=False))
    # A path may have bytes that are no text.
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(buffer, "utf-8", "surrogateescape", line_buffering=by_line)


def exit_now(end: SystemExit) -> NoReturn:
    """Exit as ``end`` requests, but leave the memory to the kernel: Python takes a second to free torch.

    Registered exit functions are run; they release the semaphores of data workers, for example.
    """
    if isinstance(end.code, str):
        raise end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or the pipe has no reader
            stream.flush()
    os._exit(end.code or 0)  # Python would end by SIGINT if an interrupt had passed through exec, as of a dataclass
