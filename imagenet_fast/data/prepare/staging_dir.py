"""The directory being filled: used by one process at a time, with every piece in it complete or absent."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt, ValidationError

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table
from imagenet_fast.units import exact_size

RECORD = "prepared.json"
"""File beside the splits that records how they were made."""

SPLITS = ("train", "val")

_T = TypeVar("_T", bound=Table)


PreparedFormat = Literal["folder", "webdataset", "pixels"]
"""Image files, or WebDataset shards of them, or WebDataset shards of decoded images (``decode.store_pixels``)."""


class Settings(Table):
    """The settings that decide the bytes of the result, besides the source."""

    format: PreparedFormat
    resize: PositiveInt | None
    quality: PositiveInt | None
    shard_size: PositiveInt | None = None
    """Bytes per shard; None for folders."""

    def __str__(self) -> str:
        """Return the settings as command-line options."""
        shards = "" if self.shard_size is None else f" --shard-size {exact_size(self.shard_size)}"
        shrunk = "" if self.resize is None else f" --resize {self.resize}"
        quality = "" if self.quality is None else f" --quality {self.quality}"
        return f"--format {self.format}{shards}{shrunk}{quality}"

    @property
    def decodes(self) -> bool:
        """True if images are decoded and written anew; False if their bytes are copied."""
        return self.resize is not None or self.format == "pixels"


class Made(Table):
    """A class or a shard that has been made."""

    images: NonNegativeInt = Field(validation_alias=AliasChoices("images", "pictures"))
    size: NonNegativeInt
    """Bytes of the source that it was made from; another number shows that the source is another."""
    left_out: tuple[str, ...] = ()
    """Names of files that are not images."""
    undecodable: tuple[str, ...] = ()
    """Names of images that could not be decoded for shrinking, and are copied unchanged."""


Splits = dict[str, dict[str, Made]]
"""Finished classes by split and name."""

Tell = Callable[[int], None]
"""A callback that gets the bytes just read from the source, and raises CancelledError if the work is to stop."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a split that is made in one go: a class's folder, or a shard."""

    split: str
    name: str
    files: tuple[str, ...]
    """The files or folders of the piece, in the folder of the split."""
    size: int
    """Bytes of the source that it is made from, as in ``Made``."""
    make: Callable[[Path, Tell], Made]
    """Function that makes these files in an existing folder."""


class Noted(Table):
    """A line of the journal: a piece that is made but whose split is not in its place yet."""

    split: str
    name: str
    files: tuple[str, ...]
    made: Made


class Record(Table):
    """The contents of a directory, by class."""

    settings: Settings
    splits: Splits
    files: dict[str, dict[str, NonNegativeInt]] = Field(default_factory=dict)
    """Bytes of each shard, by split and file name."""
    others: tuple[str, ...] = ()
    """Files that belong to no class and were left out."""
    apart: tuple[str, ...] = ()
    """Images that are not directly in a class's folder, and were left out."""
    hidden: tuple[str, ...] = ()
    """Folders left out because their names are not those of classes."""


@dataclass(frozen=True)
class StagingDir:
    """A folder inside ``out``, on the same file system, for pieces that are made or in the making.

    It is removed at the end. A piece is made in ``partial``, noted in a journal, and then moved beside the others of
    its split. The disk is synced between noting and moving. So a piece that is noted and moved is complete, even if
    this process was killed or the power failed. Everything else is made again.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """The path of the folder."""
        return self.out / ".preparing"

    @property
    def _partial(self) -> Path:
        return self.folder / "partial"

    @property
    def _journal(self) -> Path:
        return self.folder / "made.jsonl"

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    def landed(self, split: str) -> bool:
        """Return whether the split is in its place, where loaders look for it."""
        return (self.out / split).exists()

    def open(self, settings: Settings) -> Record:
        """Return the record of the splits that are in their places.

        Raises:
            UserError: These splits, or unfinished work, have other settings, or were not made here.
        """
        finished = _read(self.out / RECORD, Record)
        begun = _read(self._settings, Settings) if self.noted() else None
        for before in (begun, None if finished is None else finished.settings):
            if before not in (None, settings):
                raise UserError(
                    f"{self.out} was prepared with {before}, not with {settings}; give the same, or another --out"
                )
        if finished is None:
            finished = Record(settings=settings, splits={})
        for split in SPLITS:
            if self.landed(split) and split not in finished.splits:
                raise UserError(f"{self.out / split} is there already, and not from `data prepare`; give another --out")
        splits = {split: there for split, there in finished.splits.items() if self.landed(split)}
        files = {split: there for split, there in finished.files.items() if split in splits}
        return finished.model_copy(update={"splits": splits, "files": files})

    def noted(self) -> list[Noted]:
        """Return the pieces that are in the journal and were moved, but whose split is not in its place yet."""
        found = []
        with suppress(FileNotFoundError):
            for line in self._journal.read_text(errors="replace", encoding="utf-8").split("\n"):
                try:
                    entry = Noted.model_validate_json(line)
                except ValidationError:  # an incomplete line, or the end of the file; no line after it can be trusted
                    break
                if all((self.folder / entry.split / file).exists() for file in entry.files):
                    found.append(entry)
        return found

    def begin(self, settings: Settings) -> None:
        """Create the folder, and remove what is only partly made."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        atomic_write_text(self._settings, settings.model_dump_json(), fsync=True)
        noted = self.noted()
        atomic_write_text(self._journal, "".join(map(_line, noted)), fsync=True)  # drops an incomplete last line
        whole = {(entry.split, file) for entry in noted for file in entry.files}
        for split in SPLITS:
            (self._partial / split).mkdir(parents=True)
            for path in (self.folder / split).glob("*"):
                if (split, path.name) not in whole:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make(self, piece: Piece, tell: Tell) -> Made:
        """Make a piece in ``partial``.

        Raises:
            UserError: The folder cannot be written to.
        """
        try:
            return piece.make(self._partial / piece.split, tell)
        except OSError as error:
            raise UserError(
                f"{self.out} cannot be written to ({error.strerror}); put that right, and the same command goes on"
            ) from None

    def keep(self, ready: Mapping[Piece, Made]) -> None:
        """Note finished pieces in the journal and move them, so that they are never made again."""
        with self._journal.open("a", encoding="utf-8") as journal:
            for piece, made in ready.items():
                journal.write(_line(Noted(split=piece.split, name=piece.name, files=piece.files, made=made)))
        sync_disk(self.folder)
        for piece in ready:
            (self.folder / piece.split).mkdir(exist_ok=True)
            for file in piece.files:
                (self._partial / piece.split / file).rename(self.folder / piece.split / file)

    def sizes(self, pieces: Iterable[Piece]) -> dict[str, dict[str, int]]:
        """Return the bytes of each file of pieces that are kept, by split and file name."""
        found: dict[str, dict[str, int]] = {}
        for piece in pieces:
            for file in piece.files:
                found.setdefault(piece.split, {})[file] = (self.folder / piece.split / file).stat().st_size
        return found

    def publish(self, record: Record) -> None:
        """Write the record, and move all splits to their places."""
        sync_disk(self.folder)
        atomic_write_text(self.out / RECORD, record.model_dump_json(indent=1) + "\n", fsync=True)
        for split in record.splits:
            if not self.landed(split):
                (self.folder / split).rename(self.out / split)
        sync_disk(self.out)

    def close(self) -> None:
        """Remove the folder, once there is nothing left to do."""
        shutil.rmtree(self.folder)


def _line(entry: Noted) -> str:
    return entry.model_dump_json() + "\n"


def _read(path: Path, kind: type[_T]) -> _T | None:
    """Return the table in ``path``, or None if there is no such file. Raises UserError if it is damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise UserError(
            f"{path} is damaged; remove {path.parent} and prepare it again, or give another --out"
        ) from None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Create ``folder``, and lock it for this process.

    Raises:
        UserError: The folder cannot be created, or another process is filling it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}); give a directory of yours") from None
    try:  # the directory itself: a file would be left among what users get
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder} is being prepared by another process; wait for it, or stop it") from None
    except OSError:  # a file system without locks, or, like NFS, without locks on directories
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def sync_disk(folder: Path) -> None:
    """Sync the file system of ``folder``, so that all that was written to it survives a loss of power.

    This is one call for any number of files. A million fsyncs, one per file, would take longer than writing the files.

    Raises:
        OSError: The file system cannot be synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)
