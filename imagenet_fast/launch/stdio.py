"""stdout and stderr that never raise, whatever happens to their terminal, pipe or disk.

Printed text is a report on the run, not its purpose. Without this module, a closed pipe (`| head`), a full disk or a
locale without "–" would raise in the middle of a run, in any line that prints.
"""

from __future__ import annotations

import atexit
import codecs
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

_PLAIN = {"–": "-", "·": "*", "×": "x"}
"""Replacements for characters of our own that a terminal may not support."""

_HANDLER = "imagenet-fast"

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
    codecs.register_error(_HANDLER, _stand_in)
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def print_file(content: bytes) -> None:
    """Print the content of a file as it is, in UTF-8, whatever the terminal's encoding."""
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # the output is captured as text
        sys.stdout.write(content.decode())
        return
    sys.stdout.flush()
    binary.write(content)
    binary.flush()


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
    """Return the replacement of ``stream``, which writes to file descriptor ``number``, or is None if closed."""
    if stream is None:
        _open_nothing(number)
        return _text_over(number, "utf-8", line_buffering=True)
    if not isinstance(stream, io.TextIOWrapper):  # the output is captured
        return stream
    with suppress(OSError):
        stream.flush()
    return _text_over(number, stream.encoding, stream.line_buffering or stream.write_through)


def _open_nothing(number: int) -> None:
    """Connect ``number`` to the null device, before a file of the run could be opened under that number."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)


def _text_over(number: int, encoding: str, line_buffering: bool) -> TextIO:
    buffer = io.BufferedWriter(_Forgiving(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, _HANDLER, line_buffering=line_buffering)


def _stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return a replacement for a character that the encoding lacks: raw bytes of a path, else a similar character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # Python's form of bytes in a path that are not text
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1


def exit_now(end: SystemExit) -> NoReturn:
    """Exit as ``end`` requests, but leave the memory to the kernel: Python takes a second to free torch.

    Registered exit functions are run; they release the semaphores of data workers, for example.
    """
    if "torch" not in sys.modules or isinstance(end.code, str):
        raise end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or the pipe has no reader
            stream.flush()
    os._exit(end.code or 0)
