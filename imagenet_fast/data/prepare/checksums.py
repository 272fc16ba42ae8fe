"""Check by md5 that archives are those from image-net.org."""

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
    """Raise UserError if a file does not have its md5.

    Files that passed before are not read again unless their size or mtime has changed. This is remembered in a file in
    ``memory``.

    Args:
        md5: The expected md5 of each file.
        memory: The folder that remembers which files have passed.
        pool: Runs one check per file.
        bars: Shows the progress.
        stop: Ends the check when it is set.

    Raises:
        UserError: A file has another md5.
        CancelledError: ``stop`` is set.
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
