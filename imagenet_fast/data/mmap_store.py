"""Store pixels of images of any size in one file that several processes map, fill and read at the same time.

The file is ``pixels``. Beside it, ``index`` holds 64 bits per image: where its pixels begin, its height and its width,
or 0 if the image is not stored. Pixels are only ever appended. The index entry is set in one store after the pixels
are written. So processes need no communication. One that dies leaves at most a gap. An image that two processes add
at the same time is stored twice, with the same pixels.

The disk may receive the index before the pixels. So ``synced`` is a copy of the index from a time when all its pixels
were on the disk. After a crash of the node, only this copy can be trusted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.data.decode import Pixels

Entries = NDArray[np.uint64]
"""Index, uint64 [images]: 34 bits for the position in units of ``_UNIT`` bytes, 15 for height, 15 for width."""

PIXELS, INDEX, SYNCED = "pixels", "index", "synced"

_UNIT = 256
_SIDE_BITS = 15
_LONGEST = 2**_SIDE_BITS - 1
_MOST = 2 ** (64 - 2 * _SIDE_BITS) * _UNIT  # bytes: 4.4 TB
_PART = 2**26
"""Bytes by which a process extends the file for itself; less for a small file."""


class MmapImageStore:
    """An open store in ``folder``. Thread-safe.

    While it exists it holds a shared lock, so that ``alone`` returns False.
    """

    def __init__(self, folder: Path, images: int, index: str, writable: bool, bytes_expected: int) -> None:
        """Open the store.

        Args:
            folder: Directory of the store.
            images: Number of images in the index.
            index: File name of the index, ``INDEX`` or ``SYNCED``.
            writable: Whether images can be added.
            bytes_expected: Size of all pixels in the end. With fewer bytes, the file is extended in smaller parts.

        Raises:
            OSError: If a file cannot be opened.
            ValueError: If the index is too short.
        """
        mode = "r+b" if writable else "rb"
        self._folder = folder
        self._pixels = (folder / PIXELS).open(mode, buffering=0)
        self._index = (folder / index).open(mode, buffering=0)
        with suppress(OSError):  # fails for a read-only file over NFS; filelock has no shared lock of a file as it is
            fcntl.flock(self._index, fcntl.LOCK_SH)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(self._index.fileno(), 8 * images, access=access)
        self.entries: Entries = np.frombuffer(mapped, dtype=np.uint64)
        self._mapped = np.empty(0, dtype=np.uint8)
        self._part = min(_PART, max(2**16, bytes_expected // 64))
        self._begin = self._end = 0
        self._lock = Lock()

    def read(self, image: int) -> Pixels | None:
        """Return the pixels of ``image`` in memory that all processes share; None if it is not stored."""
        entry = self.entries.item(image)
        if not entry:
            return None
        begin, height, width = _unpacked(entry)
        end = begin + 3 * height * width
        mapped = self._mapped  # which another thread may replace, even by a shorter one
        if end > len(mapped):  # the file has grown; arrays in the old map stay valid
            mapped = np.frombuffer(mmap.mmap(self._pixels.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
            self._mapped = mapped
        return mapped[begin:end].reshape(height, width, 3)

    def write(self, image: int, pixels: Pixels) -> None:
        """Append the pixels of ``image``, unless their size or position does not fit in an index entry.

        Raises:
            OSError: If they cannot be written, as on a full disk. Writing through a map would raise SIGBUS there.
        """
        height, width, _ = pixels.shape
        if max(height, width) > _LONGEST:
            return
        begin = self._take(pixels.nbytes)
        if begin + pixels.nbytes > _MOST:
            return
        left = np.ascontiguousarray(pixels).reshape(-1)
        at = begin
        while len(left):
            written = os.pwrite(self._pixels.fileno(), left.data, at)
            left, at = left[written:], at + written
        self.entries[image] = _packed(begin, height, width)

    def sync(self) -> None:
        """Flush all that is stored now to the disk, so that it survives a crash of the node.

        Raises:
            OSError: If a file cannot be written.
        """
        entries = self.entries.copy()
        os.fsync(self._pixels.fileno())
        with atomic_path(self._folder / SYNCED, fsync=True, shared=True) as partial:
            partial.write_bytes(entries.tobytes())

    def _take(self, size: int) -> int:
        """Reserve ``size`` bytes of the file for the calling thread, and return where they begin."""
        with self._lock:
            if self._begin + size > self._end:
                self._begin, self._end = self._lengthen(max(self._part, size))
            begin = self._begin
            self._begin = _rounded_up(begin + size)
            return begin

    def _lengthen(self, size: int) -> tuple[int, int]:
        """Extend the file by ``size`` bytes for this process, allocated on the disk; return their begin and end."""
        file = self._pixels.fileno()
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            end = os.fstat(file).st_size
            begin = _rounded_up(end)
            try:
                os.posix_fallocate(file, begin, size)
            except OSError:
                os.ftruncate(file, end)
                raise
            return begin, begin + size
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def make_empty(folder: Path, images: int) -> None:
    """Create an empty store for ``images`` images, in place of what is there.

    Raises:
        OSError: If a file cannot be replaced, or the disk is full.
    """
    for name in (PIXELS, INDEX, SYNCED):
        (folder / name).unlink(missing_ok=True)
    (folder / PIXELS).touch()
    with (folder / INDEX).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * images)


def restore_synced(folder: Path, images: int) -> None:
    """Reset the index to what was certainly on the disk when the node went down.

    Raises:
        OSError: If a file cannot be read or written.
    """
    synced = folder / SYNCED
    with (folder / INDEX).open("r+b") as file:
        file.write(synced.read_bytes() if synced.exists() else bytes(8 * images))
        file.truncate()


def bytes_taken(folder: Path) -> int:
    """Return the bytes that the pixels take on the disk; 0 if they cannot be found."""
    try:
        return 512 * (folder / PIXELS).stat().st_blocks
    except OSError:
        return 0


def alone(folder: Path) -> bool:
    """Return whether no process has a ``MmapImageStore`` of ``folder`` open.

    Raises:
        OSError: If the index cannot be opened or locked.
    """
    try:
        with (folder / INDEX).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def read_entries(folder: Path, name: str, images: int) -> Entries | None:
    """Read an index; None if it is damaged.

    Args:
        folder: Directory of the store.
        name: File name of the index, ``INDEX`` or ``SYNCED``. A missing ``SYNCED`` is read as zeros.
        images: Number of images that the index must have.

    Raises:
        OSError: If a file cannot be read.
    """
    try:
        found = np.fromfile(folder / name, dtype=np.uint64)
    except FileNotFoundError:
        return np.zeros(images, dtype=np.uint64) if name == SYNCED else None
    begins, heights, widths = _unpacked(found)
    there = found > 0
    whole = (heights > 0) & (widths > 0) & (begins + 3 * heights * widths <= (folder / PIXELS).stat().st_size)
    return found if len(found) == images and bool(np.all(whole[there])) else None


def read_alone(folder: Path, entry: int) -> Pixels:
    """Read the pixels of an index entry without a map.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file ends before the pixels do.
    """
    begin, height, width = _unpacked(entry)
    with (folder / PIXELS).open("rb") as file:
        found = os.pread(file.fileno(), 3 * height * width, begin)
    return np.frombuffer(found, dtype=np.uint8).reshape(height, width, 3)


def _packed(begin: int, height: int, width: int) -> int:
    return begin // _UNIT << 2 * _SIDE_BITS | height << _SIDE_BITS | width


@overload
def _unpacked(entry: int) -> tuple[int, int, int]: ...
@overload
def _unpacked(entry: Entries) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
def _unpacked(entry: Any) -> tuple[Any, Any, Any]:
    """Return begin in bytes, height and width of an index entry."""
    begin, height = (entry >> 2 * _SIDE_BITS) * _UNIT, entry >> _SIDE_BITS & _LONGEST
    return begin, height, entry & _LONGEST


def _rounded_up(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
