"""stdout and stderr that never fail, whatever becomes of the terminal, the pipe or the disk they lead to.

What is printed tells of the work; it is not the work. Without this a reader that leaves (`| head`), a full disk or a
locale without "–" would raise in the middle of a run, in whichever line happens to print.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from imagenet_fast.errors import exit_with_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PLAIN = {"–": "-", "·": "*", "×": "x"}
"""Instead of characters of our own that a terminal may not have."""

_HANDLER = "imagenet-fast"

_lost: OSError | None = None
"""Why output did not arrive; a reader that left is no reason."""


class _Forgiving(io.FileIO):
    """A file descriptor on which writes always succeed: what cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        global _lost
        try:
            while (written := super().write(data)) is None:  # another program has set the pipe to not block
                select.select([], [self], [])
        except OSError as error:
            if error.errno != errno.EPIPE:
                _lost = error
            return memoryview(data).nbytes
        return written


def keep_printing() -> None:
    """From now on no print to stdout or stderr raises. Call it once, when a process starts."""
    codecs.register_error(_HANDLER, _stand_in)
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def print_file(content: bytes) -> None:
    """Print what is meant for a file, in UTF-8 whatever the terminal's encoding is."""
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # somebody catches what is printed, as text
        sys.stdout.write(content.decode())
        return
    sys.stdout.flush()
    binary.write(content)
    binary.flush()


def refuse_if_lost() -> None:
    """Exit with code 2, and say so, where something printed to stdout or stderr could not be written.

    For commands whose result is what they print. Nothing is said of a reader that left, as `head` does.
    """
    sys.stdout.flush()
    if _lost is not None:
        exit_with_error(
            f"the output could not be written ({_lost.strerror}); see to where it goes, and run the command again"
        )


def _forgiving(stream: TextIO | None, number: int) -> TextIO:
    """What replaces ``stream``, which writes to the file descriptor ``number`` or is None where that is closed."""
    if stream is None:
        _open_nothing(number)
        return _text_over(number, "utf-8", line_buffering=True)
    if not isinstance(stream, io.TextIOWrapper):  # of somebody who catches what is printed
        return stream
    with suppress(OSError):
        stream.flush()
    return _text_over(number, stream.encoding, stream.line_buffering or stream.write_through)


def _open_nothing(number: int) -> None:
    """Have ``number`` lead nowhere, before a file of the run is opened under it."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)


def _text_over(number: int, encoding: str, line_buffering: bool) -> TextIO:
    buffer = io.BufferedWriter(_Forgiving(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, _HANDLER, line_buffering=line_buffering)


def _stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that the encoding lacks: bytes of a path as they were, else a sign like them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # how Python has what is not text in a path
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
