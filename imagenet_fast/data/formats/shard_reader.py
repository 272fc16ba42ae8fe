"""Images that lie one after another in a few large files."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.formats.index_cache import Index, moving
from imagenet_fast.data.image_source import digest_of
from imagenet_fast.errors import UserError

COLUMNS = {"shards": "<i4", "offsets": "<i8", "lengths": "<i8", "before": "<i8", "labels": "<i8"}
"""Of every image: the number of its shard; where its bytes begin there and how many they are; how far before them its
record begins, or its member's header; and its label as it is written."""

CLASSES = "classes.txt"
"""The names of the classes, a line each in the order of their labels, where shards have only numbers."""

Row = tuple[int, int, int, int]
"""Offset, length, before and label of one image."""

Found = TypeVar("Found")

_THREADS = 16  # that wait for a file server
_GAP = 1 << 17  # bytes that are sooner read than skipped


class Shards:
    """One split. Many threads may read at once, from files that are opened when they are needed."""

    def __init__(self, files: Sequence[Path], index: Index, labels: NDArray[np.int64], classes: list[str]) -> None:
        self.files = [str(file) for file in files]
        self.labels = labels
        self.classes = classes
        self._shards, self._offsets, self._lengths, self._before = (
            index.columns[name] for name in ("shards", "offsets", "lengths", "before")
        )
        self._open = lru_cache(_descriptors(len(files)))(Descriptor)

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, index: int) -> str:
        """What a person is told where image ``index`` is bad: its shard and its place there."""
        return f"{self.files[self._shards[index]]}: byte {self._offsets[index]}"

    def maybe_named(self, names: Collection[str]) -> Iterator[int]:
        """Images that may have one of these names, by their shards: names of images have to be read."""
        for number, file in enumerate(self.files):
            if any(name.startswith(f"{file}: ") for name in names):
                yield from range(*np.searchsorted(self._shards, (number, number + 1)).tolist())

    def read(self, index: int) -> bytes:
        """Image ``index``, still encoded. Raises UserError where its shard ends before it."""
        return self.read_at(index, int(self._offsets[index]), int(self._lengths[index]))

    def digest(self) -> str:
        """Of the places and labels of all images: reading their names would take long."""
        names = b"\0".join(os.fsencode(os.path.basename(file)) for file in self.files)  # noqa: PTH119
        return digest_of(names, self._shards, self._offsets, self._lengths, self.labels)

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Have the system begin to read these images, neighbours in one go, so that a file server is waited for once
        and not for each."""
        if not hasattr(os, "posix_fadvise"):
            return
        ordered = indices[np.lexsort((self._offsets[indices], self._shards[indices]))]
        for shard, group in groupby(ordered.tolist(), key=lambda index: int(self._shards[index])):
            descriptor = self._open(self.files[shard])
            places = ((int(self._offsets[index]), int(self._lengths[index])) for index in group)
            for begin, end in _together(places):
                os.posix_fadvise(descriptor.number, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read_at(self, index: int, offset: int, length: int) -> bytes:
        """Bytes of the shard of image ``index``. Raises UserError where it ends before them."""
        content = self._open(self.files[self._shards[index]]).read(offset, length)
        if len(content) < length:
            raise UserError(f"{self.name(index)}: the shard ends before the image does; copy or make it again")
        return content


class Descriptor:
    """A file open for reading, until nobody refers to it: no thread's file is closed under its hands."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, offset: int, length: int) -> bytes:
        """Fewer bytes than ``length`` where the file ends."""
        content = os.pread(self.number, length, offset)
        while len(content) < length and (more := os.pread(self.number, length - len(content), offset + len(content))):
            content += more
        return content


def look_through(files: Sequence[Path], look: Callable[[Path], list[Found]]) -> Iterator[list[Found]]:
    """What ``look`` finds in each file, in order: in threads, as the disk is waited for more than is computed."""
    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for found in threads.map(look, files):
                moving()
                yield found
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def columns_of(rows: Sequence[Sequence[Row]]) -> dict[str, NDArray[Any]]:
    """Of the images in each shard."""
    table = np.asarray([row for found in rows for row in found], dtype=np.int64).reshape(-1, 4)
    shards = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
    columns = (shards, *table.T)
    return {name: column.astype(dtype) for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)}


def read_classes(root: Path) -> list[str] | None:
    """The names in ``classes.txt``; None where there is none. Raises UserError where it names a class twice, or an
    empty one."""
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
    """From where to where to read, for those offsets and lengths, which rise."""
    begin, end = next(places, (0, 0))
    end += begin
    for offset, length in places:
        if offset > end + _GAP:
            yield begin, end
            begin = offset
        end = max(end, offset + length)
    yield begin, end


def _descriptors(files: int) -> int:
    """How many to hold open, of those that this process may have."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files if allowed == resource.RLIM_INFINITY else max(1, min(files, allowed // 4))
