"""Events: kept in a run's events.jsonl, its authoritative record, one event per line, and passed on to sinks.

The record can be read while the run writes it.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text, check_place, to_json
from imagenet_fast.errors import UserError, warn
from imagenet_fast.run.run_dir import RunDir

Event = dict[str, Any]
"""Values measured at one step, as a line of ``events.jsonl`` has them.

``event`` is its name, ``step`` the optimizer steps done so far, ``run_s`` the seconds since the run began. The names of
the other values include their units. The last event of a run is called ``end``.
"""

Sink = Callable[[Event], None]
"""A reader of a run's events, such as the console. It is called with each event; ``end`` is the last."""


class MetricLogger:
    """Writes events to ``events.jsonl``, without buffering, and passes them on to every sink.

    One that could not be written is written before the next one, so that none is lost or torn while the process lives.
    Nothing is written to a file that has lost its name: with its directory renamed, a run's record would be here and
    what it saves elsewhere.

    >>> record("train", step, loss=2.3, lr=0.1)
    """

    def __init__(self, run_s: Callable[[], float], sinks: Sequence[Sink] = (), folder: Path | None = None) -> None:
        """Create a logger.

        Args:
            run_s: Returns the seconds since the run began.
            sinks: Receive every event, when it is written.
            folder: The run directory; None: nothing is written, as on ranks other than 0.
        """
        self._run_s = run_s
        self._sinks = sinks
        if folder is not None:
            self._path = RunDir(folder).events
            self._file = self._path.open("ab", buffering=0)
            self._sinks = [self._append, *sinks]
        self._pending = b""
        self._waits = False

    def __call__(self, name: str, step: int, **values: Any) -> None:
        """Record one event.

        If the disk is full or the run's directory has another name now, print a warning once; ``events.jsonl`` gets
        the events later, unless this is the end.

        Raises:
            UserError: It cannot be written for any other reason.
        """
        event = {"event": name, "step": step, "run_s": round(self._run_s(), 4), **values}
        errors = []
        for sink in self._sinks:
            try:
                sink(event)
            except OSError as error:
                errors.append(error)
        obstacles = [_obstacle(error) for error in errors]
        if obstacles and name == "end":
            warn(f"the run's last events are not recorded: {obstacles[0]}")
        elif obstacles and not self._waits:
            warn(f"{obstacles[0]}, and what happens meanwhile is recorded then")
        self._waits = bool(obstacles)

    def _append(self, event: Event) -> None:
        """Append an event, and any earlier one that could not be written. Raises OSError if it must wait."""
        self._pending += f"{to_json(event)}\n".encode()
        check_place(self._path, self._file.fileno())
        while self._pending:  # a write may take only a part
            self._pending = self._pending[self._file.write(self._pending) :]
        if event["event"] == "end":
            self._file.close()


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


def take_back(folder: Path, step: int) -> list[Event]:
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


def read_events(folder: Path) -> list[Event]:
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


def _event(line: bytes) -> Event | None:
    """Return the event of a line, or None if it holds none."""
    try:
        event = json.loads(line)
        types = [type(event[key]) for key in ("event", "step", "run_s")]
        is_event = types in ([str, int, int], [str, int, float]) and math.isfinite(event["run_s"])
    except (ValueError, RecursionError, TypeError, LookupError, OverflowError):
        return None
    return dict(event) if is_event else None
