"""Files that are there whole or not at all, also after the power has failed."""

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
    """What a file must be: its size in bytes, and its CRC-32 in hexadecimal.

    CRC-32, as it takes a third of the time of blake2b, and any processor has it fast: the thread that computes it may
    take that time from the decoding of images. It is there to find what disks do, not what people do.
    """

    size: NonNegativeInt
    crc32: str


def sum_of(chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Of the file that consists of them."""
    size = crc = 0
    for chunk in chunks:
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return FileSum(size=size, crc32=f"{crc:08x}")


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Write ``path``: under another name, synced, moved there, the directory synced.

    Raises OSError that names ``path``, or what ``chunks`` raises; there is then what was before, or all of the new.
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
            error.filename = str(path)  # a write has none, and nobody knows the other name
        raise
    return found


def _writing(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        file.write(chunk)
        yield chunk


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` survive a loss of power, on file systems that can say so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)
