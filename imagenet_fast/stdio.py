"""stdout and stderr that never raise and hold nobody up, wherever they lead, and are UTF-8 in any locale.

Printed text is a report on the run, not its purpose. Without this module, a closed pipe (`| head`), a full disk or a
locale without "–" would raise in the middle of a run, in any line that prints; and a terminal that is held (Ctrl-S) or
a pager would stop it.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import select
import sys
from contextlib import suppress
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, NoReturn, TextIO

from imagenet_fast.errors import exit_with_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MOST = 10_000  # writes that may wait for a reader, mostly of a line
_READ_S, _UNREAD_S = 0.2, 3.0  # a reader takes less; when nobody is expected to read any more, at the end

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


class _Unhurried(_Forgiving):
    """One that holds nobody up: a thread writes, and lines that nobody reads are dropped and counted."""

    def __init__(self, number: int) -> None:
        """Write to file descriptor ``number``."""
        super().__init__(number, "w", closefd=False)
        self._queue = Queue[bytes]()
        self._is_read, self._dropped = True, 0
        self._thread = Thread(target=self._run, daemon=True)
        with suppress(RuntimeError):  # no more threads may be started
            self._thread.start()

    def write(self, data: ReadableBuffer, /) -> int:
        """Write ``data``, now if somebody reads, else later; return the number of bytes."""
        text = bytes(data)
        if not self._thread.is_alive():  # nor is it in a process that was forked
            return super().write(text)
        if self._queue.unfinished_tasks > (0 if self._dropped else _MOST):
            self._dropped += text.count(b"\n")
        else:
            self._put(text)
            self._is_read = self._is_read and self._is_written(_READ_S)
        return len(text)

    def finish(self) -> None:
        """Wait as long as somebody reads."""
        if self._dropped:
            self._put(b"")
        left = -1
        while left != (left := self._queue.unfinished_tasks):
            self._is_written(_UNREAD_S)

    def _put(self, text: bytes) -> None:
        if self._dropped:
            text = f"({self._dropped} lines that nobody read are left out)\n".encode() + text
            self._dropped = 0
        self._queue.put(text)

    def _is_written(self, within_s: float) -> bool:
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, within_s)

    def _run(self) -> None:
        while True:
            text = memoryview(self._queue.get())
            while text:
                text = text[super().write(text) :]
            self._queue.task_done()
            self._is_read |= not self._queue.unfinished_tasks


def keep_printing(waits: bool = True) -> None:
    """Make prints to stdout and stderr never raise. Call this once, at the start of a process.

    Args:
        waits: Whether to wait until all is read, as by a pager. If not, whoever prints waits for no reader, and what
            nobody reads is dropped and counted: right where output is a report on what is done.
    """
    sys.stdout, sys.stderr = _forgiving(sys.stdout, 1, waits), _forgiving(sys.stderr, 2, waits)
    atexit.register(_finish, sys.stdout, sys.stderr)


def _finish(stdout: TextIO, stderr: TextIO) -> None:
    for stream in (stdout, stderr):
        with suppress(OSError, ValueError, KeyboardInterrupt):  # closed; Ctrl-C ends the wait for a reader
            stream.flush()
            if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer.raw, _Unhurried):
                stream.buffer.raw.finish()


def refuse_if_lost() -> None:
    """Exit with code 2 and a message if output to stdout or stderr was lost.

    This is for commands whose result is their output. A closed pipe, as of `head`, is no error.
    """
    sys.stdout.flush()
    if _lost is not None:
        exit_with_error(
            f"the output could not be written ({_lost.strerror}); see to where it goes, and run the command again"
        )


def _forgiving(stream: TextIO | None, number: int, waits: bool) -> TextIO:
    """Return the replacement of ``stream``, which writes to file descriptor ``number``; None: it was closed."""
    if stream is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # so that no file of the run gets that number
        return os.fdopen(number, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):  # the output is captured
        return stream
    with suppress(OSError):
        stream.flush()
    file = _Forgiving(number, "w", closefd=False) if waits else _Unhurried(number)
    # A path may have bytes that are no text.
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "surrogateescape", line_buffering=by_line)


def exit_now(end: SystemExit) -> NoReturn:
    """Exit as ``end`` requests, but leave the memory to the kernel: Python takes a second to free torch.

    Registered exit functions are run; they release the semaphores of data workers, for example, and finish printing.
    """
    if isinstance(end.code, str):
        raise end
    atexit._run_exitfuncs()
    os._exit(end.code or 0)  # Python would end by SIGINT if an interrupt had passed through exec, as of a dataclass
