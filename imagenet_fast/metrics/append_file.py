"""A file of a run that grows by lines, also over a time in which its disk is full."""

from __future__ import annotations

from pathlib import Path


class AppendedFile:
    """Every line is there as soon as :meth:`write` returns. A line that the disk did not take is written before the
    next one, so that no line is lost or torn while the process lives."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, text: str) -> None:
        """Raises OSError where the disk takes nothing now."""
        self._pending += text.encode()
        self._flush()

    def close(self) -> None:
        """Raises OSError where lines are lost."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]
