"""The directory that is being filled: one process at a time, and every class of it there whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from imagenet_fast.data.appearing import write_whole
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.table import Table

RECORD = "prepared.json"
"""Beside the splits: how they were made."""

SPLITS = ("train", "val")

_T = TypeVar("_T", bound=Table)


class Settings(Table):
    """What decides the bytes of the result, beside the source's."""

    format: str
    resize: PositiveInt | None
    quality: PositiveInt | None

    def __str__(self) -> str:
        return f"--format {self.format}" + (
            "" if self.resize is None else f" --resize {self.resize} --quality {self.quality}"
        )


class Made(Table):
    """A class that has been made."""

    pictures: NonNegativeInt
    size: NonNegativeInt
    """Bytes of the source that it was made from, by which another source is known."""
    left_out: tuple[str, ...] = ()
    """Names of files that are no pictures."""
    undecodable: tuple[str, ...] = ()
    """Names of pictures that were to be shrunk and could not; they are copied as they are."""


class _Entry(Table):
    """A line of the journal."""

    split: str
    name: str
    made: Made


class Record(Table):
    """What a directory holds: classes by split and name."""

    settings: Settings
    splits: dict[str, dict[str, Made]]
    others: tuple[str, ...] = ()
    """Files left out that belong to no class."""


@dataclass(frozen=True)
class Workshop:
    """Inside ``out``, on the same file system: classes that are made, and others in the making. It is gone at the end.

    A class is made in ``partial``, noted in a journal, and moved beside the classes of its split, with the disk synced
    in between: what is noted and has moved is whole, whenever this process was killed or the power failed; everything
    else is made again.
    """

    out: Path

    @property
    def folder(self) -> Path:
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
        """Whether it is in its place, where loaders look for it."""
        return (self.out / split).exists()

    def open(self, settings: Settings) -> Record:
        """What has been made so far. Raises UserError where that was by other settings, or not here."""
        finished = _read(self.out / RECORD, Record)
        begun = _read(self._settings, Settings)
        made = {split: self._noted(split) for split in SPLITS}
        for before in (begun if any(made.values()) else None, None if finished is None else finished.settings):
            if before not in (None, settings):
                raise UserError(
                    f"{self.out} was prepared with {before}, not with {settings}; give the same, or another --out"
                )
        done = {} if finished is None else finished.splits
        for split in SPLITS:
            if self.landed(split) and split not in done:
                raise UserError(f"{self.out / split} is there already, and not from `data prepare`; give another --out")
        splits = {split: done[split] if self.landed(split) else made[split] for split in SPLITS}
        others = () if finished is None else finished.others
        return Record(settings=settings, splits={name: there for name, there in splits.items() if there}, others=others)

    def begin(self, record: Record) -> None:
        """Clear away what is half made."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        write_whole(self._settings, record.settings.model_dump_json())
        waiting = {split: made for split, made in record.splits.items() if not self.landed(split)}
        lines = (_line(split, name, made) for split, classes in waiting.items() for name, made in classes.items())
        write_whole(self._journal, "".join(lines))  # without what it ended in, if that was half a line
        for split in SPLITS:
            for folder in (self.folder / split).glob("*"):
                if folder.name not in waiting.get(split, {}):
                    shutil.rmtree(folder)

    def _noted(self, split: str) -> dict[str, Made]:
        """The classes that the journal has and that have moved."""
        found = {}
        with suppress(FileNotFoundError):
            for line in self._journal.read_text(errors="replace").split("\n"):
                try:
                    entry = _Entry.model_validate_json(line)
                except ValidationError:  # half a line, or its end; what comes after half of one is not to be trusted
                    break
                if entry.split == split and (self.folder / split / entry.name).is_dir():
                    found[entry.name] = entry.made
        return found

    def partial(self, split: str, name: str) -> Path:
        """A new folder where a class is to be made."""
        folder = self._partial / split / name
        folder.mkdir(parents=True)
        return folder

    def keep(self, ready: Mapping[tuple[str, str], Made]) -> None:
        """Classes, by split and name, that are made: they need never be made again."""
        with self._journal.open("a") as journal:
            journal.writelines(_line(split, name, made) for (split, name), made in ready.items())
        sync_disk(self.folder)
        for split, name in ready:
            (self.folder / split).mkdir(exist_ok=True)
            (self._partial / split / name).rename(self.folder / split / name)

    def finish(self, record: Record) -> None:
        """Put all splits in their places."""
        sync_disk(self.folder)
        write_whole(self.out / RECORD, record.model_dump_json(indent=1) + "\n")
        for split in record.splits:
            if not self.landed(split):
                (self.folder / split).rename(self.out / split)
        sync_disk(self.out)
        shutil.rmtree(self.folder)


def _line(split: str, name: str, made: Made) -> str:
    return _Entry(split=split, name=name, made=made).model_dump_json() + "\n"


def _read(path: Path, kind: type[_T]) -> _T | None:
    """Raises UserError where it is damaged."""
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
    """Make ``folder``, and keep it to this process.

    Raises UserError where it cannot be made, or another process is filling it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}); give a directory of yours") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder} is being prepared by another process; wait for it, or stop it") from None
    except OSError:  # a file system without locks, or, as NFS, without those of directories
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def sync_disk(folder: Path) -> None:
    """Have all that was written to the file system of ``folder`` survive a loss of power.

    One call for however many files: an fsync each, a million of them, would take longer than to write them.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)
