"""Images stored one after another in a few large files."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.decode import PIXELS, Pixels, stored_pixels
from imagenet_fast.data.formats.index_cache import Index, moving
from imagenet_fast.data.image_source import digest_of
from imagenet_fast.errors import UserError

COLUMNS = {"shards": "<i4", "offsets": "<i8", "lengths": "<i8", "before": "<i8", "labels": "<i8"}
"""Columns of a shard index, with their dtypes.

For each image: the number of its shard; the offset and the length of its bytes there; how many bytes before them its
record, or its member's header, begins; and its label as stored.
"""

CLASSES = "classes.txt"
"""The file with the class names, one per line in the order of labels, for shards that only have numbers."""

Row = tuple[int, int, int, int]
"""Offset, length, ``before`` and label of one image, as in ``COLUMNS``."""

Found = TypeVar("Found")

_THREADS = 16  # they wait for a file server
_GAP = 1 << 17  # bytes; reading a gap of this size is faster than skipping it


class Shards:
    """One split in shards. Many threads may read at once; shards are opened when needed."""

    def __init__(self, files: Sequence[Path], index: Index, labels: NDArray[np.int64], classes: list[str]) -> None:
        """Create the split of the images that ``index`` lists in ``files``.

        Args:
            files: The shards, in the order of the shard numbers in ``index``.
            index: The index, with all columns of ``COLUMNS``.
            labels: [images], indices into ``classes``.
            classes: The names of the classes.
        """
        self.files = [str(file) for file in files]
        self.labels = labels
        self.classes = classes
        self._shards, self._offsets, self._lengths, self._before = (
            index.columns[name] for name in ("shards", "offsets", "lengths", "before")
        )
        self._open = lru_cache(_descriptors(len(files)))(Descriptor)
        self._map = lru_cache(_descriptors(len(files)))(_mapped)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._offsets)

    def name(self, index: int) -> str:
        """Return what messages call image ``index``: its shard and its offset there."""
        return f"{self.files[self._shards[index]]}: byte {self._offsets[index]}"

    def maybe_named(self, names: Collection[str]) -> Iterator[int]:
        """Yield the images that may have one of these names: all images of the shards named there.

        Comparing the images' own names would mean reading them from the shards.
        """
        for number, file in enumerate(self.files):
            if any(name.startswith(f"{file}: ") for name in names):
                yield from range(*np.searchsorted(self._shards, (number, number + 1)).tolist())

    def read(self, index: int) -> bytes:
        """Return image ``index``, still encoded.

        Raises:
            UserError: The shard ends before the image does.
        """
        return self.read_at(index, int(self._offsets[index]), int(self._lengths[index]))

    def pixels(self, index: int) -> Pixels | None:
        """Return the pixels of image ``index`` where they are stored, in memory that all processes share."""
        if not self._stores_pixels:
            return None
        begin = int(self._offsets[index])
        return stored_pixels(self._map(self.files[self._shards[index]])[begin : begin + int(self._lengths[index])])

    @cached_property
    def _stores_pixels(self) -> bool:
        """True if the first image is stored as pixels. Other shards are not mapped: there a disk error is a SIGBUS."""
        with suppress(OSError, UserError):
            return self.read_at(0, int(self._offsets[0]), len(PIXELS)) == PIXELS
        return False

    def digest(self) -> str:
        """Return a digest of the shards' names, and of the places and labels of all images.

        The images' own names are left out: reading them would take long.
        """
        names = b"\0".join(os.fsencode(os.path.basename(file)) for file in self.files)  # noqa: PTH119
        return digest_of(names, self._shards, self._offsets, self._lengths, self.labels)

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Ask the system to start reading these images, close neighbours in one request.

        A file server is then waited for once, not once per image. Does nothing without ``posix_fadvise``.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        ordered = indices[np.lexsort((self._offsets[indices], self._shards[indices]))]
        for shard, group in groupby(ordered.tolist(), key=lambda index: int(self._shards[index])):
            places = ((int(self._offsets[index]), int(self._lengths[index])) for index in group)
            with suppress(OSError):  # whoever reads the image meets it again, and can name the image or skip it
                descriptor = self._open(self.files[shard])
                for begin, end in _together(places):
                    os.posix_fadvise(descriptor.number, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read_at(self, index: int, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset`` of the shard that holds image ``index``.

        Raises:
            UserError: The shard ends before these bytes do.
        """
        content = self._open(self.files[self._shards[index]]).read(offset, length)
        if len(content) < length:
            raise UserError(f"{self.name(index)}: the shard ends before the image does; copy or make it again")
        return content


class Descriptor:
    """A file open for reading, closed once nothing refers to it: never while a thread reads it."""

    def __init__(self, path: str) -> None:
        """Open the file at ``path``."""
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``, or fewer where the file ends."""
        content = os.pread(self.number, length, offset)
        while len(content) < length and (more := os.pread(self.number, length - len(content), offset + len(content))):
            content += more
        return content


def _mapped(path: str) -> memoryview:
    """Return a file's bytes, read from the disk as they are used."""
    with open(path, "rb") as file:  # noqa: PTH123
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def look_through(files: Sequence[Path], look: Callable[[Path], list[Found]]) -> Iterator[list[Found]]:
    """Yield the result of ``look`` for each file, in order.

    It runs in threads, because waiting for the disk takes longer than computing.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for found in threads.map(look, files):
                moving()
                yield found
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def columns_of(rows: Sequence[Sequence[Row]]) -> dict[str, NDArray[Any]]:
    """Return the columns of ``COLUMNS`` from the rows of each shard."""
    table = np.asarray([row for found in rows for row in found], dtype=np.int64).reshape(-1, 4)
    shards = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
    columns = (shards, *table.T)
    return {name: column.astype(dtype) for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)}


def read_classes(root: Path) -> list[str] | None:
    """Return the class names in ``classes.txt``, or None if there is no such file.

    Raises:
        UserError: A name is empty or occurs twice.
    """
    path = root / CLASSES
    try:
        names = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except FileNotFoundError:
        return None
    lines = [os.fsdecode(name.removesuffix(b"\r")) for name in names]
    if "" in lines or len(set(lines)) < len(lines):
        raise UserError(f"{path}: every class has a name of its own; write one a line, in the order of labels")
    return lines


def _together(places: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges to read, as (begin, end), for (offset, length) pairs in rising order."""
    begin, end = next(places, (0, 0))
    end += begin
    for offset, length in places:
        if offset > end + _GAP:
            yield begin, end
            begin = offset
        end = max(end, offset + length)
    yield begin, end


def _descriptors(files: int) -> int:
    """Return how many shards to hold open: at most a quarter of the files that this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files if allowed == resource.RLIM_INFINITY else max(1, min(files, allowed // 4))
