"""Write images to WebDataset shards: the same images always give the same bytes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.data.pixels import kind_of
from imagenet_fast.data.shards import CLASSES, IMAGES
from imagenet_fast.errors import UserError

_WHEN_S = 1_325_376_000  # 2012, as in ImageNet's archives; tars store a time, and must always be the same


class Sample(NamedTuple):
    """An image as it is stored, with its name in the source."""

    name: str
    encoded: bytes
    label: int
    """An index into the class names."""


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the class names to ``classes.txt`` in ``folder``.

    Raises:
        UserError: As ``check_classes`` does.
    """
    check_classes(folder, classes)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / CLASSES, fsync=True) as partial:
        partial.write_bytes(_lines(classes))


def check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Raise UserError if a name does not fit on one line, or ``classes.txt`` has other names already."""
    if strange := [name for name in classes if not name or "\n" in name or name.endswith("\r")]:
        raise UserError(f"a class named {strange[0]!r} does not fit a line of {CLASSES}; rename its folder")
    path = folder / CLASSES
    if path.exists() and path.read_bytes() != _lines(classes):
        raise UserError(
            f"{path} names other classes than are to be written there; give another directory, or remove what is there"
        )


def _lines(classes: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\n" for name in classes)


def write_tar(path: Path, samples: Iterable[tuple[int, Sample]]) -> None:
    """Write one WebDataset shard.

    Args:
        path: The shard.
        samples: Each sample with its number, which becomes its key.
    """
    with tarfile.open(path, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in samples:
            for extension, content in ((_extension(sample), sample.encoded), ("cls", b"%d" % sample.label)):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size, member.mtime = len(content), _WHEN_S
                tar.addfile(member, io.BytesIO(content))
    os.utime(path, (_WHEN_S, _WHEN_S))


def _extension(sample: Sample) -> str:
    """Return the extension by the image's first bytes, else by its name."""
    named = Path(sample.name).suffix[1:].lower()
    return kind_of(sample.encoded) or (named if named in IMAGES else "jpg")
