"""Write files that are whole or not there, also after a power failure."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import NonNegativeInt

from imagenet_fast.recipe.base import Table


class FileSum(Table):
    """Expected size of a file in bytes, and its CRC-32 in hexadecimal.

    CRC-32 takes a third of the time of blake2b, and every processor computes it fast. That matters because the thread
    may take this time from image decoding. It is meant to find disk faults, not tampering.
    """

    size: NonNegativeInt
    crc32: str


def sum_of(chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Return the size and checksum of the file that consists of ``chunks``."""
    size = crc = 0
    for chunk in chunks:
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return FileSum(size=size, crc32=f"{crc:08x}")


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Write ``path`` durably: under another name, synced, renamed, and the directory synced.

    Returns:
        Size and checksum of the file.

    Raises:
        OSError: It names ``path``. An error of ``chunks`` is raised too. Either way, ``path`` is as before or complete.
    """
    partial = path.with_name(f".{path.name}")
    try:
        with partial.open("wb") as file:
            found = sum_of(_writing(file, chunks))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a write error has no file name, and the user does not know the other name
        raise
    return found


def _writing(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        file.write(chunk)
        yield chunk


def sync_folder(folder: Path) -> None:
    """Sync the names in ``folder`` to disk, so that they survive a power failure, where the file system can.

    Raises:
        OSError: The directory cannot be synced; the error names it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)
