"""Check that a disk has room for what is to be written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Executor
from contextlib import suppress
from pathlib import Path

from rich.progress import Progress

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.data.prepare.jpeg_resize import shrinking_ratio
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings
from imagenet_fast.errors import UserError
from imagenet_fast.units import gigabytes

_SPARE = 1.02  # a file's last block is half empty, and folders take space too
_SAMPLE_SPARE = 1.1

_PIECE = 4 << 20  # bytes


def check_space(
    out: Path, size: int, files: int, settings: Settings, sample: Callable[[], Iterable[SourceFile]]
) -> None:
    """Raise UserError if the result does not fit into ``out``.

    The size of pixels is estimated from a ``sample``. Images to be shrunk are first counted at their size in the
    source. Only if that does not fit is their new size estimated, too.

    Args:
        out: A directory on the disk to check.
        size: Bytes of all images in the source.
        files: Number of files to write.
        settings: The settings of the result.
        sample: Returns some of the images; called only to estimate how much they shrink.

    Raises:
        UserError: The disk has too few free bytes, or too few free inodes.
    """
    needed = _SPARE * size
    free = shutil.disk_usage(out).free
    told = ""
    if settings.format == "pixels" or (needed > free and settings.decodes):
        needed *= _SAMPLE_SPARE * shrinking_ratio(sample(), settings)
        told = f" at --resize {settings.resize}, by a sample of them" if settings.resize else " as pixels"
    if needed > free:
        raise UserError(
            f"the images need {gigabytes(needed)}{told}, and the disk of {out} has {gigabytes(free)} free: "
            f"{gigabytes(needed - free)} are missing; free them, or give --out on another disk"
        )
    room = os.statvfs(out)
    if room.f_files > 0 and room.f_favail < files:
        raise UserError(f"the disk of {out} has room for {room.f_favail} more files only (`df -i`); give another --out")


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
    atomic_write_text(memory / "checked.json", json.dumps(stamps), fsync=True)


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
