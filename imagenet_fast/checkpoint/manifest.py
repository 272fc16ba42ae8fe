"""Describe a checkpoint: the step and run it is from, and its files; write these, and their checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table

MANIFEST = "manifest.json"
SHARED = "shared.safetensors"
_SUM, _END = b',\n  "crc32": ', b"\n}"
"""The bytes of a manifest that stand before its checksum, and after it."""


def part_name(rank: int) -> str:
    """Return the name of the file with what only ``rank`` holds."""
    return f"rank-{rank:05}.safetensors"


class FileSum(Table):
    """Expected size of a file in bytes, and its CRC-32 in hexadecimal.

    CRC-32 takes a third of the time of blake2b, and every processor computes it fast. That matters because the thread
    may take this time from image decoding. It is meant to find disk faults, not tampering.
    """

    size: NonNegativeInt
    crc32: str


class CorruptCheckpoint(Exception):
    """A checkpoint is not whole; the message is the name of the file and what is wrong with it."""

    def __init__(self, path: Path, what: str) -> None:
        """Report ``what`` is wrong with the file ``path``."""
        super().__init__(f"{path.name} {what}")


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are as they were."""

    def __init__(self, failure: str, remedy: str, then: str) -> None:
        """Combine the parts of the message.

        Args:
            failure: What failed.
            remedy: What the user can do about it.
            then: What to do after that, if the run ends.
        """
        super().__init__(f"{failure}; {remedy}, then {then}")
        self.in_short = f"{failure}; {remedy}"
        """The message without what to do if the run ends."""


class Stamp(Table):
    """Step and run that a checkpoint is from."""

    step: NonNegativeInt
    epoch: NonNegativeInt
    world: PositiveInt
    """Number of ranks."""
    layout: dict[str, PositiveInt]
    """Number of ranks along each axis, such as data and tensor."""
    recipe: str
    """Digest of the settings that decide the result."""
    top1: float | None = None
    """Top-1 accuracy in percent; None if the weights were not evaluated."""


class Manifest(Stamp):
    """Content of a checkpoint's ``manifest.json``, without the checksum that is its last field."""

    format: Literal[1, 2] = 2
    """Format 2 sums the bytes before the checksum; format 1 summed the same fields without white space."""
    number: PositiveInt
    """Number of this checkpoint in its run, from 1; only this tells which one is the newest.

    A run that went back writes later checkpoints at earlier steps, and the clock may be set back.
    """
    files: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.safetensors$")], FileSum]

    def write(self, folder: Path) -> None:
        """Write the manifest, which makes ``folder`` a checkpoint.

        Raises:
            OSError: The file cannot be written.
        """
        body = self.model_dump_json(indent=2).encode().removesuffix(_END)
        write_durably(folder / MANIFEST, [body, _SUM, _seal(body), _END, b"\n"])


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``folder``.

    Raises:
        CorruptCheckpoint: The manifest is unreadable or invalid, or disagrees with its own checksum.
        FileNotFoundError: ``folder`` is no checkpoint, or not a complete one.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise CorruptCheckpoint(path, "is no file")
        body, _, seal = path.read_bytes().rpartition(_SUM)
        manifest = Manifest.model_validate_json(body + _END)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptCheckpoint(path, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where + ': ' if where else ''}{first['msg']}"
        raise CorruptCheckpoint(path, f"is no manifest that this version reads ({what})") from None
    if manifest.format == 1:
        body = json.dumps(json.loads(body + _END), separators=(",", ":"), ensure_ascii=False).encode()
    if seal != _seal(body) + _END + b"\n":
        raise CorruptCheckpoint(path, "disagrees with its own checksum")
    return manifest


def _seal(body: bytes) -> bytes:
    return f'"{sum_of([body]).crc32}"'.encode()


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
    try:
        with atomic_path(path, fsync=True) as partial, partial.open("wb") as file:
            return sum_of(_writing(file, chunks))
    except OSError as error:
        error.filename = str(path)  # a write error has no file name, and the user does not know the other name
        raise


def _writing(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        file.write(chunk)
        yield chunk
