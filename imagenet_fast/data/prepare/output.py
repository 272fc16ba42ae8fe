"""The directory being filled: used by one process at a time, and its splits appear when they are whole.

Pieces are made in ``.preparing`` in it, on the same file system. One is written under another name and renamed when it
has reached the disk. So a piece that has its name is whole, even if the process was killed or the power failed, and
everything else is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import Field, NonNegativeInt, ValidationError

from imagenet_fast.atomic_io import atomic_write_text, sync_folder
from imagenet_fast.data.folders import list_folder
from imagenet_fast.data.prepare.files import SPLITS
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.data.source import open_training, open_validation
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table

RECORD = "prepared.json"
"""File beside the splits that records how they were made."""

_T = TypeVar("_T", bound=Table)


class PreparedClass(Table):
    """The images that were made of a class."""

    images: NonNegativeInt
    size: NonNegativeInt
    """Bytes of the source that it was made from."""


class Record(Table, extra="ignore"):
    """The contents of a directory, by class; what earlier versions wrote besides is ignored."""

    settings: Settings
    splits: dict[str, dict[str, PreparedClass]] = Field(default_factory=dict)
    """The classes by split and name."""
    files: dict[str, dict[str, NonNegativeInt]] = Field(default_factory=dict)
    """Bytes of each shard, by split and file name."""
    others: tuple[str, ...] = ()
    """Files that are not images, and were left out."""
    apart: tuple[str, ...] = ()
    """Images that are not directly in a class's folder, and were left out."""
    parquet: dict[str, dict[str, NonNegativeInt]] = Field(default_factory=dict)
    """Bytes of each parquet file of the source, by split and file name."""


class Begun(Table):
    """The settings and the source of the pieces in ``.preparing``."""

    settings: Settings
    classes: dict[str, NonNegativeInt]
    """The bytes of each class in the source, by its path."""


def in_place(out: Path, settings: Settings) -> Record:
    """Return the record of the splits that are in their places.

    Raises:
        UserError: They, or what was there, have other settings, or were not made here.
    """
    finished = _read(out / RECORD, Record) or Record(settings=settings)
    if finished.settings != settings:
        raise UserError(
            f"{out} was prepared with {finished.settings}, not with {settings}; give the same, or another --out"
        )
    landed = [split for split in SPLITS if (out / split).exists()]
    for split in landed:
        if split not in finished.splits:
            raise UserError(f"{out / split} is there already, and not from `data prepare`; give another --out")
    kept = {
        table: {split: there for split, there in getattr(finished, table).items() if split in landed}
        for table in ("splits", "files", "parquet")
    }
    return finished.model_copy(update=kept)


def begin(staging: Path, now: Begun, source: Path) -> None:
    """Create the folder ``staging`` for pieces of ``source``, and remove what is only partly made.

    Raises UserError if pieces in it have other settings, or are of another source.
    """
    note, splits = staging / "settings.json", {path.partition("/")[0] for path in now.classes}
    if any(any((staging / split).glob("*")) for split in SPLITS) and (begun := _read(note, Begun)):
        if begun.settings != now.settings:
            raise UserError(
                f"{staging.parent} was begun with {begun.settings}, not with {now.settings}; give the same or another "
                f"--out, or remove {staging}"
            )
        changed = [path for path, _ in begun.classes.items() ^ now.classes.items() if path.partition("/")[0] in splits]
        if changed:
            raise UserError(
                f"{staging.parent} was begun from another source than {source}, by {min(changed)}; give that one or "
                f"another --out, or remove {staging}"
            )
    shutil.rmtree(staging / "partial", ignore_errors=True)
    for folder in ("partial", "."):
        for split in splits:
            (staging / folder / split).mkdir(parents=True, exist_ok=True)
    atomic_write_text(note, now.model_dump_json(), fsync=True)


def _read(path: Path, kind: type[_T]) -> _T | None:
    """Return the table in ``path``, or None if there is no such file. Raises UserError if it is damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise UserError(
            f"{path} is damaged, or of another version; remove {path.parent} and prepare it again, or give another "
            "--out"
        ) from None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Create ``folder``, and lock it for this process.

    Raises:
        UserError: It cannot be created, or another process is filling it.
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


def check_same(
    before: Record, out: Path, sized: Mapping[str, int], parquet: Mapping[str, Mapping[str, int]], source: Path
) -> None:
    """Raise UserError if ``out`` was made from another source, or has been changed since.

    The source has classes ``sized`` in bytes, by their paths, and ``parquet`` files in bytes, by split and file name.
    """
    for split, classes in before.splits.items():
        then = before.parquet.get(split) or {f"{split}/{name}": made.size for name, made in classes.items()}
        now = parquet.get(split) or {path: size for path, size in sized.items() if path.startswith(f"{split}/")}
        if now and (others := then.items() ^ now.items()):  # else the source has only the other split
            raise UserError(
                f"{out} was made from another source than {source}, by {min(others)[0]}; give that one, or another "
                "--out"
            )
        if before.settings.format == "folder":
            for name, made in classes.items():
                folder = out / split / name
                if not folder.is_dir() or len(list_folder(folder).images) != made.images:
                    _refuse_changed(folder, f"{made.images} images")
        for name, size in before.files.get(split, {}).items():
            path = out / split / name
            if not path.is_file() or path.stat().st_size != size:
                _refuse_changed(path, f"{size} bytes")


def _refuse_changed(path: Path, held: str) -> NoReturn:
    raise UserError(
        f"{path} has not the {held} any more that were put there; remove {path.parent}, and it is made again"
    )


def publish(record: Record, out: Path, staging: Path) -> None:
    """Write the record, and move all splits to their places; ``staging`` is removed at the end."""
    os.sync()
    atomic_write_text(out / RECORD, record.model_dump_json(indent=1) + "\n", fsync=True)
    for split in record.splits:
        if not (out / split).exists():
            (staging / split).rename(out / split)
    sync_folder(out)
    if record.files:  # open the shards as the first run would, so that it need not wait for the index
        if "train" in record.splits:
            open_training(out)
        if "val" in record.splits:
            open_validation(out)
    shutil.rmtree(staging)
