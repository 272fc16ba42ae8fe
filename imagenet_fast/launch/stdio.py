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

_waits = True
"""Whether this process ends only when all is read; else what nobody reads is dropped."""
_lost: OSError | None = None
"""The error that lost output, if any; a closed pipe does not count."""
_files: list[_Forgiving] = []
"""What stdout and stderr lead to: one file, perhaps, in which lines of both keep their order."""


class _Forgiving(io.FileIO):
    """A file descriptor on which writes always succeed: a thread does them. What cannot be written is dropped."""

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
            self._write(text)
        elif not _waits and self._queue.qsize() >= (_MOST // 2 if self._dropped else _MOST):
            self._dropped += text.count(b"\n")
        else:
            self._put(text)
            self._is_read = self._is_read and self._is_written(_READ_S)
        return len(text)

    def finish(self) -> int:
        """Wait until all is written, or nobody seems to read any more; return how many lines are not."""
        left = -1
        while self._thread.is_alive() and left != self._queue.unfinished_tasks:
            left = self._queue.unfinished_tasks
            self._is_written(None if _waits else _UNREAD_S)
        if self._dropped and not left:
            self._put(b"")
            self._is_written(_UNREAD_S)
        waiting: list[bytes] = [*self._queue.queue]
        return self._dropped + sum(text.count(b"\n") for text in waiting)

    def _put(self, text: bytes) -> None:
        if self._dropped:
            text = f"({self._dropped} lines that nobody read are left out)\n".encode() + text
            self._dropped = 0
        self._queue.put(text)

    def _is_written(self, within_s: float | None) -> bool:
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, within_s)

    def _run(self) -> None:
        while True:
            self._write(self._queue.get())
            self._queue.task_done()
            self._is_read |= not self._queue.unfinished_tasks

    def _write(self, text: bytes) -> None:
        global _lost
        try:
            while text:
                if (written := super().write(text)) is None:  # another program has made the pipe non-blocking
                    select.select([], [self], [])
                text = text[written or 0 :]
        except OSError as error:
            if error.errno != errno.EPIPE:
                _lost = error


def keep_printing(waits: bool = True) -> None:
    """Make prints to stdout and stderr never raise. Call this once, at the start of a process.

    Args:
        waits: Whether to wait at the end until all is read, as by a pager. If not, whoever prints waits for no reader,
            and what nobody reads is dropped and counted: right where output is a report on what is done.
    """
    global _waits
    _waits = waits
    sys.stdout, sys.stderr = _forgiving(sys.stdout, 1), _forgiving(sys.stderr, 2)
    atexit.register(finish_printing, sys.stdout, sys.stderr)


def finish_printing(*streams: TextIO) -> None:
    """Flush ``streams``, and write what has been printed; Ctrl-C ends the wait for a reader."""
    unread = 0
    try:
        for stream in streams:
            with suppress(OSError, ValueError):  # closed
                stream.flush()
        for file in _files:
            if unread:  # of stdout, and this is stderr
                file.write(f"warning: the last {unread} lines of output were read by nobody\n".encode())
            unread = file.finish()
    except KeyboardInterrupt:
        if _waits:
            os._exit(130)


def refuse_if_lost() -> None:
    """Exit with code 2 and a message if output to stdout or stderr was lost.

    This is for commands whose result is their output. A closed pipe, as of `head`, is no error.
    """
    finish_printing(sys.stdout)
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
    if not (same := [file for file in _files if os.path.sameopenfile(file.fileno(), number)]):
        _files.extend(same := [_Forgiving(number)])
    # A path may have bytes that are no text.
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(io.BufferedWriter(same[0]), "utf-8", "surrogateescape", line_buffering=by_line)


def exit_now(end: SystemExit) -> NoReturn:
    """Exit as ``end`` requests, but leave the memory to the kernel: Python takes a second to free torch.

    Registered exit functions are run; they release the semaphores of data workers, for example, and finish printing.
    """
    if isinstance(end.code, str):
        raise end
    atexit._run_exitfuncs()
    os._exit(end.code or 0)  # Python would end by SIGINT if an interrupt had passed through exec, as of a dataclass
