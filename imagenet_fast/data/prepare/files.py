"""Files of a source by where their bytes lie, in tars or on their own: all that a writer of any format needs.

Single images cannot be read from parquet files, only groups of hundreds; so these are first made into tars.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.data.archives import tar_members
from imagenet_fast.data.folders import is_image_name, shown
from imagenet_fast.data.source import SplitName, in_sentences
from imagenet_fast.errors import UserError

SPLITS: tuple[SplitName, ...] = ("train", "val")

_ROWS = 64  # to decode at a time


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source: ``size`` bytes of the file ``held_by``, from ``offset``."""

    name: str
    held_by: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the file's bytes. Raises UserError if the bytes cannot be read, or there are fewer than ``size``."""
        try:
            with open(self.held_by, "rb", buffering=0) as file:  # noqa: PTH123  (a million of them)
                content = os.pread(file.fileno(), self.size, self.offset)
        except OSError as error:
            raise UserError(
                f"{self.held_by} cannot be read ({error.strerror}); put that right, and the same command goes on"
            ) from None
        if len(content) != self.size:
            raise UserError(f"{self.held_by} breaks off within '{self.name}'; fetch it again")
        return content


@dataclass(frozen=True, eq=False)
class SourceClass:
    """One class of one split of a source."""

    split: str
    name: str
    files: Callable[[], list[SourceFile]]
    """Function that lists the class's files; some may not be images."""
    size: int
    """Bytes that the files take, or slightly fewer."""

    @property
    def path(self) -> str:
        """The class's path, ``split/name``."""
        return f"{self.split}/{self.name}"

    @in_sentences()
    def sorted_out(self) -> tuple[list[SourceFile], tuple[str, ...]]:
        """Return the images of the class, and the sorted names of its other files.

        Raises:
            UserError: There are no images, or two of one name, or the class cannot be listed.
        """
        files = self.files()
        images = [file for file in files if is_image_name(file.name)]
        if len({file.name for file in images}) < len(images):
            raise UserError(f"{self.path} has two images of one name in the source; keep one of them")
        if not images:
            raise UserError(f"{self.path} has no images in the source; add them, or leave that class out")
        return images, tuple(sorted(shown(file.name) for file in files if not is_image_name(file.name)))


@dataclass(frozen=True)
class Source:
    """ImageNet, or a part of it, as the user has it."""

    classes: list[SourceClass]
    others: list[str] = field(default_factory=list)
    """Files that belong to no class and are left out."""
    apart: list[str] = field(default_factory=list)
    """Images that are not directly in a class's folder, and are left out."""
    archives: list[Path] = field(default_factory=list)
    """The tars and tables that it was found in, whose md5 may be known."""
    parquet: list[tuple[SplitName, Path]] = field(default_factory=list)
    """Files, with their splits, that must be made into tars to know their classes."""

    def __add__(self, other: Source) -> Source:
        """Return both as one."""
        return Source(*(ours + theirs for ours, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def members(tar: Path, within: SourceFile | None = None) -> list[SourceFile]:
    """Return the members of the tar in the file ``tar``, or of a tar ``within`` it. Only headers are read.

    Raises:
        UserError: It is not a whole tar, or has a member twice, or one that is no file or not at the top level.
    """
    told = str(tar) if within is None else f"'{within.name}' in {tar}"
    with tar.open("rb") as file:
        if within is None:
            return list(_members(file, tar, told, 0))
        file.seek(within.offset - tarfile.BLOCKSIZE)  # of its header
        with tarfile.open(fileobj=file, mode="r:") as outer:
            found = outer.next()
            inner = None if found is None else outer.extractfile(found)
            assert inner is not None
            return list(_members(inner, tar, told, within.offset))


def _members(stream: IO[bytes], tar: Path, told: str, begin: int) -> Iterator[SourceFile]:
    seen: set[str] = set()
    for info in tar_members(stream, told, "fetch it again"):
        if info.isdir() or "/" in info.name or info.name in ("", ".", ".."):
            raise UserError(
                f"{told} has a member '{info.name}' that leads elsewhere, and nothing is unpacked from it; ImageNet's "
                "own tars hold plain files alone, so fetch it again"
            )
        if info.name in seen:
            raise UserError(f"{told} has the member '{info.name}' twice; fetch it again")
        seen.add(info.name)
        yield SourceFile(info.name, str(tar), begin + info.offset_data, info.size)


def parquet_to_tar(parquet: Path, tar: Path, on_bytes: Callable[[int], None]) -> None:
    """Write the images of a parquet file to a tar, as their class, a dot and their name in ImageNet's tars.

    The tar is whole or not there; ``on_bytes`` is called with the bytes of each image.

    Raises:
        UserError: The file is damaged, has no images, or does not name their classes.
    """
    seen = set()
    with atomic_path(tar, fsync=True) as partial, tarfile.open(partial, "w") as archive:
        for path, content in _rows(parquet):
            named = re.fullmatch(r"(?:.*/)?([^/]+)_(n\d{8})(\.\w+)", path)
            if named is None:
                raise UserError(
                    f"{parquet} has an image '{path}', whose name does not end in its class, as that of "
                    "n01440764_10026_n01440764.JPEG does; make class folders of these files"
                )
            member = tarfile.TarInfo(f"{named[2]}.{named[1]}{named[3]}")
            if member.name in seen:
                raise UserError(f"{parquet} has two images '{path}'; give each image a name of its own")
            seen.add(member.name)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
            on_bytes(len(content))
        if not seen:
            raise UserError(f"{parquet} has no rows; take it out")


def _rows(parquet: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and bytes of each image, in the order of the file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{parquet} is read by pyarrow, which is not installed; `pip install pyarrow`") from None
    try:
        with ParquetFile(parquet) as file:
            images = (batch.column("image").to_pylist() for batch in file.iter_batches(_ROWS, columns=["image"]))
            for number, image in enumerate(chain.from_iterable(images)):
                if image is None or image["bytes"] is None or image["path"] is None:
                    raise UserError(f"{parquet}: row {number} has no image or no path; take that row out")
                yield str(image["path"]), bytes(image["bytes"])
    except (ArrowException, OSError, LookupError, TypeError) as error:
        raise UserError(
            f"{parquet} is no whole parquet file with a column image of bytes and path ({error}); fetch it again"
        ) from None
