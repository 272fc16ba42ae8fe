"""events.jsonl: the truth about a run, one event a line, readable while it is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.append_file import AppendedFile
from imagenet_fast.metrics.event import Event
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.replace_file import replace_text


class JsonLines:
    """Appends to ``events.jsonl``; a line is flushed as soon as it is written. What came after step ``resumed`` is
    taken back first, as the run goes on from there."""

    def __init__(self, folder: Path, resumed: int | None = None) -> None:
        if resumed is not None:
            _take_back(folder, resumed)
        self._file = AppendedFile(folder / "events.jsonl")

    def write(self, event: Event) -> None:
        line = {"event": event.name, "step": event.step, "run_s": round(event.run_s, 4), **event.values}
        self._file.write(to_json(line) + "\n")

    def close(self) -> None:
        self._file.close()


def _take_back(folder: Path, step: int) -> None:
    """In one move, so that there is always a whole record."""
    if not (folder / "events.jsonl").exists():
        return
    kept = [e for e in read_events(folder) if e["step"] <= step and e["event"] != "end"]
    kept = [e for e in kept if not (e["event"] == "epoch" and e["step"] == step)]  # it begins again
    replace_text(folder / "events.jsonl", "".join(to_json(event) + "\n" for event in kept))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run; a last line that was cut off in the writing is left out, and any other that is none is named
    on stderr. Raises UserError where the file cannot be read."""
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
    """That of a line; None where it is none."""
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
    raise ValueError(f"{constant} is no JSON")
