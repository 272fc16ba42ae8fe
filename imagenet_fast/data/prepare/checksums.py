"""Whether archives are those that image-net.org gives."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Executor
from contextlib import suppress
from pathlib import Path

from rich.progress import Progress

from imagenet_fast.data.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError

_PIECE = 4 << 20  # bytes


def check_archives(
    md5: Mapping[Path, str], memory: Path, pool: Executor, bars: Progress, stop: threading.Event
) -> None:
    """Raise UserError where a file has not its md5, CancelledError once ``stop`` is set.

    Files that were right before are not read again, unless their size or time has changed: that is kept in the folder
    ``memory``.
    """
    known: dict[str, list[int]] = {}
    with suppress(OSError, ValueError):
        known = json.loads((memory / "checked.json").read_text(encoding="utf-8"))
    stamps = {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in md5}

    def check(file: Path) -> None:
        if known.get(str(file)) == stamps[str(file)]:
            return
        task = bars.add_task(f"md5 of {file.name}", total=stamps[str(file)][0])

        def tell(read: int) -> None:
            if stop.is_set():
                raise CancelledError
            bars.advance(task, read)

        _check(file, md5[file], tell)

    for _ in pool.map(check, md5):
        pass
    atomic_write_text(memory / "checked.json", json.dumps(stamps))


def _check(file: Path, md5: str, tell: Callable[[int], None]) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            tell(len(piece))
    if digest.hexdigest() != md5:
        raise UserError(
            f"{file} is not what image-net.org gives: its md5 is {digest.hexdigest()}, not {md5}; fetch it again, or "
            "give --no-md5 if it is meant to be another"
        )
