"""Check that a disk has room for what is to be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from imagenet_fast.data.prepare.jpeg_resize import shrinking_ratio
from imagenet_fast.data.prepare.source_files import SourceFile
from imagenet_fast.data.prepare.staging_dir import Settings
from imagenet_fast.errors import UserError

_SPARE = 1.02  # a file's last block is half empty, and folders take space too
_SAMPLE_SPARE = 1.1


def check_space(
    out: Path, size: int, files: int, settings: Settings, sample: Callable[[], Iterable[SourceFile]]
) -> None:
    """Raise UserError if the result does not fit into ``out``.

    Images to be shrunk are first counted at their size in the source. Only if that does not fit is their new size
    estimated from a ``sample``.

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
    """Return a size in bytes as text in GB, MB, kB (powers of 1000) or bytes."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"
