"""Keep checkpoints in a directory of a run: write, list, read and remove them. Only whole ones count."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from imagenet_fast.atomic_io import atomic_path, sync_folder
from imagenet_fast.checkpoint.tree import Tree, read_tree
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.base import Table

MANIFEST = "manifest.json"
SHARED = "shared.safetensors"
_SUM, _END = b',\n  "crc32": ', b"\n}"
"""The bytes of a manifest that stand before its checksum, and after it."""
_NAME = re.compile(r"(\.?)step-\d{8,}(-\d+)?")
"""Names of checkpoints; with a dot those of directories that are none yet, or no longer."""
_CPU = torch.device("cpu")
_PIECE = 1 << 24  # bytes that are read at once


def part_name(rank: int) -> str:
    """Return the name of the file with what only ``rank`` holds."""
    return f"rank-{rank:05}.safetensors"


class FileSum(Table):
    """Expected size of a file in bytes, and its CRC-32 in hexadecimal: fast, and enough for faults of disks."""

    size: NonNegativeInt
    crc32: str


Damage = tuple[str, int, str]
"""A file of a checkpoint, the number of its OSError or 0, and what is wrong with it: a message to other ranks."""


class CorruptCheckpoint(UserError):
    """A checkpoint is not whole, or the system does not let it be read."""

    def __init__(self, path: Path, what: str | OSError) -> None:
        """Report ``what`` is wrong with the file ``path``."""
        error = what if isinstance(what, OSError) else OSError(0, what)
        self.damage: Damage = (path.name, error.errno or 0, error.strerror or "")
        self.is_away = isinstance(what, OSError) and what.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
        self.what = f"{path.name} {f'cannot be read ({what.strerror})' if isinstance(what, OSError) else what}"
        told = f"{self.what}; put that right, or" if self.is_away else f"is damaged: {self.what};"
        super().__init__(f"{path.parent}{'/' if self.is_away else ' '}{told} give another checkpoint")


class Stamp(Table):
    """Step and run that a checkpoint is from."""

    step: NonNegativeInt
    epoch: NonNegativeInt
    world: PositiveInt
    """Number of ranks."""
    layout: dict[str, PositiveInt]
    """Number of ranks along each axis, such as data and tensor."""
    top1: float | None = None
    """Top-1 accuracy in percent; None if the weights were not evaluated."""


class Manifest(Stamp):
    """Content of a checkpoint's ``manifest.json``, without the checksum that is its last field."""

    format: Literal[2] = 2
    """Version of the format."""
    number: PositiveInt
    """Number of this checkpoint in its run, from 1; only this tells which one is the newest.

    A run that went back writes later checkpoints at earlier steps, and the clock may be set back.
    """
    files: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.safetensors$")], FileSum]
    same: tuple[PositiveInt, ...] = ()
    """Ranks whose part is the same as rank 0's, and has no file."""

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``, which has all the files. Raises OSError."""
        body = self.model_dump_json(indent=2).encode().removesuffix(_END)
        write_durably(folder / MANIFEST, [body, _SUM, _seal(body), _END, b"\n"])


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``folder``.

    Raises:
        CorruptCheckpoint: It is missing, unreadable or invalid, or disagrees with its own checksum.
    """
    path = folder / MANIFEST
    try:
        body, _, seal = path.read_bytes().rpartition(_SUM)
        manifest = Manifest.model_validate_json(body + _END)
    except OSError as error:
        raise CorruptCheckpoint(path, error) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where + ': ' if where else ''}{first['msg']}"
        raise CorruptCheckpoint(path, f"is no manifest that this version reads ({what})") from None
    if seal != _seal(body) + _END + b"\n":
        raise CorruptCheckpoint(path, "disagrees with its own checksum")
    return manifest


def _seal(body: bytes) -> bytes:
    return f'"{_sum_of([body]).crc32}"'.encode()


def _sum_of(chunks: Iterable[bytes | memoryview]) -> FileSum:
    size = crc = 0
    for chunk in chunks:
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return FileSum(size=size, crc32=f"{crc:08x}")


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Write ``path`` under another name, sync and rename it, and return its sum.

    After an OSError, which names ``path``, or an error of ``chunks``, it is as before or complete.
    """

    def writing(file: BinaryIO) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            file.write(chunk)
            yield chunk

    try:
        with atomic_path(path, fsync=True) as partial, partial.open("wb") as file:
            return _sum_of(writing(file))
    except OSError as error:
        error.filename = str(path)  # a write error has no file name, and the user does not know the other name
        raise


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its directory, its manifest, and what all ranks hold alike, or None, in host memory."""

    folder: Path
    manifest: Manifest
    shared: Tree
    damaged: tuple[Path, ...] = ()
    """The checkpoints that ``newest`` found damaged, and passed over."""

    def part(self, rank: int, device: torch.device = _CPU) -> Tree:
        """Return what only ``rank`` held, of the ranks there were; None if it saved nothing.

        Tensors that were on an accelerator come to ``device``. Raises CorruptCheckpoint.
        """
        return _read(self.folder / part_name(0 if rank in self.manifest.same else rank), self.manifest, device)

    def parts(self, device: torch.device = _CPU) -> Iterator[tuple[int, Tree]]:
        """Yield every rank that saved a part, and the ``part``; one at a time, since they may be many."""
        for rank in range(self.manifest.world):
            if part_name(rank) in self.manifest.files or rank in self.manifest.same:
                yield rank, self.part(rank, device)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``, or raise UserError; the parts of ranks are not read yet."""
    manifest = read_manifest(folder)
    return Checkpoint(folder, manifest, _read(folder / SHARED, manifest, _CPU))


def _read(path: Path, manifest: Manifest, device: torch.device) -> Tree:
    if path.name not in manifest.files:
        return None
    try:
        return read_tree(_content(path, manifest.files[path.name]), device)
    except ValueError as error:
        raise CorruptCheckpoint(path, str(error)) from None


def _content(path: Path, expected: FileSum) -> bytes:
    """Return the content of a file, or raise CorruptCheckpoint; the rank moves with each piece, as it may be slow."""
    try:
        if (size := path.stat().st_size) != expected.size:
            raise CorruptCheckpoint(path, f"has {size} bytes instead of {expected.size}")
        data = io.BytesIO()
        with path.open("rb") as file:
            while data.write(file.read(_PIECE)):
                here.move()
    except OSError as error:
        raise CorruptCheckpoint(path, error) from None
    if (found := _sum_of([data.getbuffer()])) != expected:
        raise CorruptCheckpoint(path, f"has the CRC-32 {found.crc32} instead of {expected.crc32}")
    return data.getvalue()


def damaged_part(folder: Path, share: slice = slice(None)) -> Damage | None:
    """Read a ``share`` of the parts of ranks in ``folder``, and return what is wrong with the first damaged one."""
    try:
        manifest = read_manifest(folder)
        for name in sorted(manifest.files.keys() - {SHARED})[share]:
            _content(folder / name, manifest.files[name])
    except CorruptCheckpoint as error:
        return error.damage
    return None


def newest(root: Path, best: bool = False, check: Callable[[Path], Damage | None] = damaged_part) -> Checkpoint | None:
    """Return the newest checkpoint under ``root`` that is whole; None if there has never been one.

    All its files are read to check it, so only one rank should do this and tell the others. It warns of damaged ones.

    Args:
        root: Directory of the checkpoints.
        best: Whether to return the one with the highest top-1 instead; None if none was evaluated.
        check: Reads the parts of ranks; they may be many, and ranks share the work.

    Raises:
        UserError: All checkpoints are damaged, or ``root`` or a newer one cannot be read.
    """
    found, damaged = read_survey(root)
    for folder in _best_first(found) if best else found:
        try:
            shared = _read(folder / SHARED, found[folder], _CPU)
            if wrong := check(folder):
                raise CorruptCheckpoint(folder / wrong[0], OSError(*wrong[1:]) if wrong[1] else wrong[2])
        except CorruptCheckpoint as error:
            damaged[folder] = error
            continue
        if away := next((damage for damage in damaged.values() if damage.is_away), None):
            raise away
        for other, damage in damaged.items():
            warn(f"checkpoint {other} is damaged: {damage.what}; {folder.name} is taken instead")
        return Checkpoint(folder, found[folder], shared, tuple(damaged))
    if damaged:
        listed = "; ".join(f"{folder.name}: {damage.what}" for folder, damage in damaged.items())
        raise UserError(
            f"no checkpoint in {root} can be read ({listed}); restore one, or begin anew in another directory"
        )
    return None


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename ``damaged`` checkpoints, so that they count no more, neither as the newest nor as the best."""
    for folder in damaged:
        with suppress(OSError):  # nor will others then be removed
            _rename(folder, f"damaged-{folder.name}")


def read_survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
    """Return what ``survey`` does, or raise UserError."""
    try:
        return survey(root)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); see to that, or give another") from None


def survey(root: Path) -> tuple[dict[Path, Manifest], dict[Path, CorruptCheckpoint]]:
    """Return the manifests from the newest checkpoint to the oldest, and the checkpoints that cannot be read.

    An OSError of ``root`` is raised, since it must not pass for an empty directory.
    """
    found, damaged = {}, {}
    for folder in _folders(root, ""):
        try:
            found[folder] = read_manifest(folder)
        except CorruptCheckpoint as error:
            damaged[folder] = error
    return dict(sorted(found.items(), key=lambda item: item[1].number, reverse=True)), damaged


def _folders(root: Path, dot: str) -> list[Path]:
    """Return the directories that are named as checkpoints, or, with a dot, as none; links belong to the user."""
    try:
        named = [path for path in root.iterdir() if (name := _NAME.fullmatch(path.name)) and name[1] == dot]
    except FileNotFoundError:
        return []
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def _best_first(found: Mapping[Path, Manifest]) -> list[Path]:
    """Return the evaluated checkpoints from the highest top-1 to the lowest; equal ones keep their order."""
    judged = {folder: manifest.top1 for folder, manifest in found.items() if manifest.top1 is not None}
    return sorted(judged, key=lambda folder: -judged[folder])


def unfinished(root: Path, step: int) -> Path:
    """Return the directory in which all ranks write a checkpoint of ``step``."""
    return root / f".step-{step:08}"


def finish(folder: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of an ``unfinished`` directory that has all its files, and return where it is now.

    Raises OSError if a file is not there, or the directory cannot be written to or renamed.
    """
    for name in manifest.files:
        (folder / name).stat()  # one that another node has written elsewhere is not
    manifest.write(folder)
    sync_folder(folder.parent.parent)
    return _rename(folder, folder.name.removeprefix("."))


def retain(found: Mapping[Path, Manifest], keep: int) -> None:
    """Remove old checkpoints: keep the newest, the best, and of the others the ``keep`` newest.

    ``found`` are the checkpoints as ``survey`` lists them. Raises OSError if one cannot be removed.
    """
    kept = [*found][:1] + _best_first(found)[:1]
    for folder in [folder for folder in found if folder not in kept][keep:]:
        shutil.rmtree(_rename(folder, f".{folder.name}"))


def sweep(root: Path) -> None:
    """Remove what killed writes and removals have left; no rank may be writing. Raises OSError."""
    for folder in _folders(root, "."):
        shutil.rmtree(folder)


def _rename(folder: Path, name: str) -> Path:
    """Rename ``folder`` for good: its old name is synced to be gone. A number is added to a name that is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))  # a run that went back had one, too
    renamed = folder.rename(next(path for name in names if not os.path.lexists(path := folder.with_name(name))))
    sync_folder(folder.parent)
    return renamed
