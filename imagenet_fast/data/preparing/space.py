"""Whether a disk has room for what is to be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from imagenet_fast.data.preparing.located import PictureClass
from imagenet_fast.data.preparing.shrinking import Undecodable, shrunk
from imagenet_fast.errors import UserError

_SPARE = 1.02  # a file's last block is half empty, and folders are files too
_SAMPLED_CLASSES, _SAMPLED_PICTURES = 16, 4
_SAMPLE_SPARE = 1.1


def check_space(out: Path, classes: Mapping[PictureClass, int], side: int | None, quality: int) -> None:
    """Raise UserError where the pictures of ``classes``, of so many bytes each, would not fit into ``out``.

    Shrunk pictures are taken for as large as they were, and only if that does not fit, for as much smaller as a sample
    of them becomes.
    """
    needed = _SPARE * sum(classes.values())
    free = shutil.disk_usage(out).free
    told = ""
    if needed > free and side is not None:
        needed *= _SAMPLE_SPARE * _ratio(list(classes), side, quality)
        told = f" at --resize {side}, by a sample of them"
    if needed > free:
        raise UserError(
            f"the pictures need {gigabytes(needed)}{told}, and the disk of {out} has {gigabytes(free)} free: "
            f"{gigabytes(needed - free)} are missing; free them, or give --out on another disk"
        )
    room = os.statvfs(out)
    if room.f_files > 0 and room.f_favail < len(classes):
        raise UserError(f"the disk of {out} has room for {room.f_favail} more files only (`df -i`); give another --out")


def _ratio(classes: Sequence[PictureClass], side: int, quality: int) -> float:
    """Of sampled pictures' bytes, after shrinking to before; 1 where there are none."""
    before = after = 0
    for of in classes[:: max(1, len(classes) // _SAMPLED_CLASSES)]:
        for file in islice((file for file in of.listed() if file.is_picture), _SAMPLED_PICTURES):
            content = file.read()
            before += len(content)
            try:
                after += len(shrunk(content, side, quality))
            except Undecodable:
                after += len(content)
    return after / before if before else 1.0


def gigabytes(size: float) -> str:
    """As people say it."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size:.0f} bytes"
