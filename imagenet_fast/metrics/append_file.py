"""A file of a run to which lines are appended, even after its disk has been full for a time."""

from __future__ import annotations

from pathlib import Path


class AppendedFile:
    """A file opened for appending, without buffering.

    A line is in the file as soon as ``write`` returns. A line that could not be written is written before the next one,
    so that no line is lost or torn while the process lives.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending."""
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, text: str) -> None:
        """Append ``text``, after any earlier text that could not be written.

        Raises:
            OSError: The text cannot be written now; it is kept for the next call.
        """
        self._pending += text.encode()
        self._flush()

    def close(self) -> None:
        """Write what is left, and close the file.

        Raises:
            OSError: The rest cannot be written, and is lost.
        """
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write the pending bytes; a write may take only a part of them."""
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]
