"""Pixels of images of all sizes, in one file that several processes map, fill and read at the same time.

Beside ``pixels`` lies ``index``: 64 bits an image, which say where its pixels begin, and its height and width; 0 where
they are not there. Pixels are only ever appended, and an index entry is stored at once when they are written. So nobody
needs to talk to another: whoever dies leaves at most a gap, and an image that two processes add at the same time is
there twice, with the same pixels.

The disk may have the index before it has the pixels. So ``synced`` is a copy of the index as it was when all that it
tells of was on the disk: what is to be believed after the machine has gone down.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.decode import Pixels

Entries = NDArray[np.uint64]
"""[images]; 34 bits for the place in units of ``_UNIT`` bytes, 15 for the height, 15 for the width."""

PIXELS, INDEX, SYNCED = "pixels", "index", "synced"

_UNIT = 256
_SIDE_BITS = 15
_LONGEST = 2**_SIDE_BITS - 1
_MOST = 2 ** (64 - 2 * _SIDE_BITS) * _UNIT  # bytes: 4.4 TB
_PART = 2**26
"""Bytes by which a process makes the file longer for itself, unless it is a small one."""


class MmapImageStore:
    """Of ``images`` in ``folder``, in which ``bytes_expected`` will be. Many threads may read and write.

    As long as it is there, nobody else can have it alone (:func:`alone`).
    """

    def __init__(self, folder: Path, images: int, index: str, writable: bool, bytes_expected: int) -> None:
        mode = "r+b" if writable else "rb"
        self._folder = folder
        self._pixels = (folder / PIXELS).open(mode, buffering=0)
        self._index = (folder / index).open(mode, buffering=0)
        with suppress(OSError):  # not of a read-only file over NFS
            fcntl.flock(self._index, fcntl.LOCK_SH)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(self._index.fileno(), 8 * images, access=access)
        self.entries: Entries = np.frombuffer(mapped, dtype=np.uint64)
        self._mapped = np.empty(0, dtype=np.uint8)
        self._part = min(_PART, max(2**16, bytes_expected // 64))
        self._begin = self._end = 0
        self._lock = Lock()

    def read(self, image: int) -> Pixels | None:
        """Its pixels, in memory that all processes share; None where they are not there."""
        entry = self.entries.item(image)
        if not entry:
            return None
        begin, height, width = _unpacked(entry)
        end = begin + 3 * height * width
        if end > len(self._mapped):  # the file has grown; what others hold of the old map stays
            self._mapped = np.frombuffer(mmap.mmap(self._pixels.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        return self._mapped[begin:end].reshape(height, width, 3)

    def write(self, image: int, pixels: Pixels) -> None:
        """Add them, unless they are larger than an entry can tell. Raises OSError, as where the disk is full: through a
        map it would be SIGBUS."""
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
        """Have all that is there now on the disk, whatever happens. Raises OSError."""
        entries = self.entries.copy()
        os.fsync(self._pixels.fileno())
        partial = self._folder / f".{SYNCED}.{uuid.uuid4().hex}"
        try:
            with partial.open("wb") as file:
                file.write(entries.tobytes())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._folder / SYNCED)
        finally:
            partial.unlink(missing_ok=True)

    def _take(self, size: int) -> int:
        """Where so many bytes may be written by this thread alone."""
        with self._lock:
            if self._begin + size > self._end:
                self._begin, self._end = self._lengthen(max(self._part, size))
            begin = self._begin
            self._begin = _rounded_up(begin + size)
            return begin

    def _lengthen(self, size: int) -> tuple[int, int]:
        """Room of this process's own at the end, which the disk really has."""
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
    """In place of what is there. Raises OSError."""
    for name in (PIXELS, INDEX, SYNCED):
        (folder / name).unlink(missing_ok=True)
    (folder / PIXELS).touch()
    with (folder / INDEX).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * images)


def go_back(folder: Path, images: int) -> None:
    """To what was on the disk for certain when the machine went down. Raises OSError."""
    synced = folder / SYNCED
    with (folder / INDEX).open("r+b") as file:
        file.write(synced.read_bytes() if synced.exists() else bytes(8 * images))
        file.truncate()


def bytes_taken(folder: Path) -> int:
    """Of the disk, by pixels."""
    try:
        return 512 * (folder / PIXELS).stat().st_blocks
    except OSError:
        return 0


def alone(folder: Path) -> bool:
    """Whether no :class:`MmapImageStore` of ``folder`` is in use, by whatever process. Raises OSError."""
    try:
        with (folder / INDEX).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def read_entries(folder: Path, name: str, images: int) -> Entries | None:
    """What an index or its copy holds, nothing if it is not there yet; None where it is damaged. Raises OSError."""
    try:
        found = np.fromfile(folder / name, dtype=np.uint64)
    except FileNotFoundError:
        return np.zeros(images, dtype=np.uint64) if name == SYNCED else None
    begins, heights, widths = _unpacked(found)
    there = found > 0
    whole = (heights > 0) & (widths > 0) & (begins + 3 * heights * widths <= (folder / PIXELS).stat().st_size)
    return found if len(found) == images and bool(np.all(whole[there])) else None


def read_alone(folder: Path, entry: int) -> Pixels:
    """The pixels that an entry tells of, without a map. Raises OSError, and ValueError where there are fewer."""
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
    """Where it begins, its height and its width."""
    begin, height = (entry >> 2 * _SIDE_BITS) * _UNIT, entry >> _SIDE_BITS & _LONGEST
    return begin, height, entry & _LONGEST


def _rounded_up(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
