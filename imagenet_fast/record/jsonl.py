"""events.jsonl: the truth about a run, one event a line, readable while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imagenet_fast.record.event import Event
from imagenet_fast.record.replacing import replace_text
from imagenet_fast.record.strict_json import to_json


class JsonLines:
    """Appends to ``events.jsonl``; a line is flushed as soon as it is written. What came after step ``resumed`` is
    taken back first, as the run goes on from there."""

    def __init__(self, folder: Path, resumed: int | None = None) -> None:
        if resumed is not None:
            _take_back(folder, resumed)
        self._file = (folder / "events.jsonl").open("a", buffering=1)

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
    """The events of a run; a last line that was cut off in the writing is left out."""
    events = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events
