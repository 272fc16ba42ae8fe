"""Events: passed on to sinks, and kept in a run's events.jsonl, its authoritative record, one event per line.

The record can be read while the run writes it.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from imagenet_fast.atomic_io import atomic_write_text, check_place
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.run_dir import RunDir


@dataclass(frozen=True)
class Event:
    """A set of values measured at one step.

    The tag of value ``v`` of event ``name`` is ``name/v``. The name of a value includes its unit.
    """

    name: str
    step: int
    """Optimizer steps done so far."""
    run_s: float
    """Seconds since the run began."""
    values: dict[str, Any]

    def tagged(self) -> dict[str, Any]:
        """Return the values by tag."""
        return {f"{self.name}/{key}": value for key, value in self.values.items()}


class Sink(Protocol):
    """A consumer of events, such as a file or the console."""

    def write(self, event: Event) -> None:
        """Record one event."""
        ...

    def close(self) -> None:
        """Release the sink's resources."""
        ...


class MetricLogger:
    """Adds the run time to values and passes them on to every sink.

    On ranks other than 0 there are no sinks, and nothing is recorded.

    >>> record("train", step, loss=2.3, lr=0.1)
    """

    def __init__(self, run_s: Callable[[], float], sinks: Sequence[Sink] = ()) -> None:
        """Create a logger.

        Args:
            run_s: Returns the seconds since the run began.
            sinks: Receive every event.
        """
        self._run_s = run_s
        self._sinks = sinks
        self._waits = False

    def __call__(self, name: str, step: int, **values: Any) -> None:
        """Record one event.

        If the disk is full or the run's directory has another name now, print a warning once; ``events.jsonl`` gets
        the events later.

        Raises:
            UserError: A sink cannot be written for any other reason.
        """
        event = Event(name, step, self._run_s(), values)
        obstacles = []
        for sink in self._sinks:
            try:
                sink.write(event)
            except OSError as error:
                obstacles.append(_obstacle(error))
        if obstacles and not self._waits:
            warn(f"{obstacles[0]}, and what happens meanwhile is recorded then")
        self._waits = bool(obstacles)

    def close(self) -> None:
        """Close all sinks, with a warning if events are lost."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                warn(f"the run's last events are not recorded ({error.strerror or error})")


def _obstacle(error: OSError) -> str:
    """Return what keeps a record waiting, and what to do. Raises UserError if waiting is of no use."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "the run's directory is on a full disk; free space there"
        case errno.ENOENT | errno.ESTALE:
            return f"{error.filename} has been moved or removed; put it back"
        case _:
            raise UserError(
                f"the run cannot be recorded ({error.strerror or error}); see to the disk of its directory, then "
                "resume the run"
            ) from None


class JsonLines:
    """A sink that appends to ``events.jsonl``, without buffering.

    An event is in the file as soon as ``write`` returns. One that could not be written is written before the next one,
    so that none is lost or torn while the process lives. Nothing is written to a file that has lost its name: with its
    directory renamed, a run's record would be here and what it saves elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file in the run directory ``folder``."""
        self._path = RunDir(folder).events
        self._file = self._path.open("ab", buffering=0)
        self._pending = b""

    def write(self, event: Event) -> None:
        """Append one event, after any earlier one that could not be written.

        Raises:
            OSError: It cannot be written now; it is kept for the next call.
        """
        line = {"event": event.name, "step": event.step, "run_s": round(event.run_s, 4), **event.values}
        self._pending += f"{to_json(line)}\n".encode()
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
        if self._pending:
            check_place(self._path, os.fstat(self._file.fileno()))
        while self._pending:  # a write may take only a part
            self._pending = self._pending[self._file.write(self._pending) :]


def take_back(folder: Path, step: int) -> list[dict[str, Any]]:
    """Remove the events that a run which resumes from ``step`` records again, and return the others.

    The file is replaced at once, so that there is always a complete record.

    Raises:
        UserError: It cannot be read.
        OSError: It cannot be written.
    """
    path = RunDir(folder).events
    if not path.exists():
        return []
    before = [e for e in read_events(folder) if e["step"] <= step and e["event"] != "end"]
    kept = [e for e in before if (e["event"], e["step"]) != ("epoch", step)]
    atomic_write_text(path, "".join(to_json(event) + "\n" for event in kept), shared=True)
    return kept


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the events of a run.

    A last line that was cut off while being written is left out. Other lines that hold no event are left out too, with
    a warning on stderr.

    Raises:
        UserError: The file cannot be read.
    """
    path = RunDir(folder).events
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); see to that, or restore it") from None
    events = [_event(line) for line in lines]
    damaged = [number for number, event in enumerate(events[:-1], start=1) if event is None]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(f"{path} is damaged: line {damaged[0]}{more} holds no event and is left out")
    return [event for event in events if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if it holds none."""
    try:
        event = json.loads(line)
        types = [type(event[key]) for key in ("event", "step", "run_s")]
        is_event = types in ([str, int, int], [str, int, float]) and math.isfinite(event["run_s"])
    except (ValueError, RecursionError, TypeError, LookupError, OverflowError):
        return None
    return dict(event) if is_event else None
