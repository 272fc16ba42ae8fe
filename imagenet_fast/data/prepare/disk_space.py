"""Whether a disk has room for what is to be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from imagenet_fast.data.prepare.jpeg_resize import shrinking_ratio
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings
from imagenet_fast.errors import UserError

_SPARE = 1.02  # a file's last block is half empty, and folders are files too
_SAMPLE_SPARE = 1.1


def check_space(
    out: Path, size: int, files: int, settings: Settings, sample: Callable[[], Iterable[SourceFile]]
) -> None:
    """Raise UserError where so many ``files``, made of ``size`` bytes of images in all, would not fit into ``out``.

    Images that are to be shrunk are taken for as large as they were, and only if that does not fit, for as much
    smaller as a ``sample`` of them becomes.
    """
    needed = _SPARE * size
    free = shutil.disk_usage(out).free
    told = ""
    if needed > free and settings.resize is not None:
        needed *= _SAMPLE_SPARE * shrinking_ratio(sample(), settings)
        told = f" at --resize {settings.resize}, by a sample of them"
    if needed > free:
        raise UserError(
            f"the images need {gigabytes(needed)}{told}, and the disk of {out} has {gigabytes(free)} free: "
            f"{gigabytes(needed - free)} are missing; free them, or give --out on another disk"
        )
    room = os.statvfs(out)
    if room.f_files > 0 and room.f_favail < files:
        raise UserError(f"the disk of {out} has room for {room.f_favail} more files only (`df -i`); give another --out")


def gigabytes(size: float) -> str:
    """As people say it."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"
