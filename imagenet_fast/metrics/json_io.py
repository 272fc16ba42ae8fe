"""Write JSON that every parser accepts, and a run's events.jsonl: its authoritative record, one event per line.

RFC 8259 has neither NaN nor infinities, but Python's own writer emits them. The record can be read while the run writes
it.
"""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.event import Event


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON, with null for each non-finite number; numpy's numbers are accepted."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(value: Any, path: Path, indent: int = 2) -> None:
    """Write the result of a command to ``path``. Raises UserError if it cannot be written."""
    try:
        path.write_text(to_json(value, indent=indent) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}); choose another place") from None


def _finite(value: Any) -> Any:
    """Return ``value`` with Python's numbers, and None for those that are not finite."""
    match value:
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case _:
            return value


class JsonLines:
    """A sink that appends to ``events.jsonl``, and flushes after each line."""

    def __init__(self, folder: Path, resumed: int | None = None) -> None:
        """Open the file.

        Args:
            folder: The run directory.
            resumed: The step from which the run resumes; later events are removed first. None: the run begins.
        """
        if resumed is not None:
            _take_back(folder, resumed)
        self._file = AppendedFile(folder / "events.jsonl")

    def write(self, event: Event) -> None:
        """Append one event."""
        line = {"event": event.name, "step": event.step, "run_s": round(event.run_s, 4), **event.values}
        self._file.write(f"{to_json(line)}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _take_back(folder: Path, step: int) -> None:
    """Remove the events after ``step``, atomically, so that there is always a complete record."""
    if not (folder / "events.jsonl").exists():
        return
    kept = [e for e in read_events(folder) if e["step"] <= step and e["event"] != "end"]
    kept = [e for e in kept if not (e["event"] == "epoch" and e["step"] == step)]  # the resumed run records it again
    atomic_write_text(folder / "events.jsonl", "".join(to_json(event) + "\n" for event in kept), shared=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the events of a run.

    A last line that was cut off while being written is left out. Other lines that hold no event are left out too, with
    a warning on stderr.

    Raises:
        UserError: The file cannot be read.
    """
    path = folder / "events.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); see to that, or restore it") from None
    events = {number: _event(line) for number, line in enumerate(lines, start=1)}
    damaged = [number for number, event in events.items() if event is None and number < len(lines)]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(f"{path} is damaged: line {damaged[0]}{more} holds no event and is left out")
    return [event for event in events.values() if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if it holds none."""
    try:
        event = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    match event:
        case {"event": str(), "step": bool()} | {"run_s": bool()}:
            return None
        case {"event": str(), "step": int(), "run_s": int() | float() as run_s} if math.isfinite(run_s):
            return {**event}
        case _:
            return None


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(f"{constant} is no JSON")


class AppendedFile:
    """A file opened for appending, without buffering.

    A record is in the file as soon as ``write`` returns. One that could not be written is written before the next one,
    so that none is lost or torn while the process lives.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending."""
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, record: bytes) -> None:
        """Append ``record``, after any earlier one that could not be written.

        Raises:
            OSError: The record cannot be written now; it is kept for the next call.
        """
        self._pending += record
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
