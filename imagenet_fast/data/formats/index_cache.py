"""The index of where each image of a split lies: built once, stored in a file, and reused until the data changes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.paths import cache_dir
from imagenet_fast.errors import UserError

_VERSION = 3
_TICK_S = 0.02  # file systems' clocks advance in steps of up to 10 ms
_MANY = 100  # files or folders; the user is told when this many are scanned

Stamp = tuple[str, int, int, int]
"""The state of a file or folder: name, size in bytes (0 for a folder), mtime in ns and ctime in ns.

Anyone can set the mtime to any value, and programs that copy do. The ctime cannot be set.
"""

Fingerprint = list[Stamp]
"""The stamps of all files or folders that an index describes."""


@dataclass(frozen=True)
class Index:
    """A table with one row per image, and facts that hold for all images."""

    about: Mapping[str, Any]
    """Facts that hold for all images, as JSON values."""
    columns: Mapping[str, NDArray[Any]]
    """Columns by name. All except columns of bytes have [images] elements."""


@dataclass(frozen=True)
class Kind:
    """A kind of index: the format of the images, and the columns with their dtypes."""

    name: str
    columns: Mapping[str, str]


def load_or_build_index(
    root: Path, split: str, kind: Kind, stamp: Callable[[], Fingerprint], make: Callable[[], Index]
) -> Index:
    """Return the index of a split under ``root``: the stored one if it is valid, else a new one.

    A stored index is valid if it is not damaged and describes the data as it is now. It is stored beside the data, or
    in the cache directory if the data directory cannot be written. One of the processes that need it builds it, and the
    others wait. If it cannot be stored anywhere, each process builds its own.

    Args:
        root: The data directory.
        split: The name of the split.
        kind: The format and the columns that the index must have.
        stamp: Returns the stamps of the data as it is now. What it raises is passed on.
        make: Builds a new index. What it raises is passed on.
    """
    stamps, places = stamp(), _places(root, split)
    reasons = []
    for place in places:
        found = _read(place, kind, stamps)
        if isinstance(found, Index):
            return found
        reasons += [f"{place} {found}"] * bool(found)
    for place in places:
        with _alone(place) as partial:
            if partial is None:
                continue
            found = _read(place, kind, stamps)
            if isinstance(found, Index):  # another process has built it
                return found
            if reasons:
                _say(f"{reasons[0]}; it is made anew")
            elif len(stamps) >= _MANY:
                _say(f"looking through the {split} split of {root} for the first time; {place} will remember it")
            stamps = _settled(stamp)
            index = make()
            _write(partial, place, kind, stamps, index)
            return index
    return make()


def check_kept(root: Path, split: str, kind: Kind, stamps: Fingerprint, fault: Callable[[Index], str]) -> None:
    """Remove the stored index of a split under ``root`` if ``fault`` finds an error in it.

    This is for faults that stamps do not show: an index with other stamps is not used anyway.

    Args:
        root: The data directory.
        split: The name of the split.
        kind: The format and the columns that the index must have.
        stamps: The stamps of the data as it is now.
        fault: Returns what is wrong with an index, or an empty string.

    Raises:
        UserError: The index cannot be removed.
    """
    for place in _places(root, split):
        found = _read(place, kind, stamps)
        if not isinstance(found, Index) or not (what := fault(found)):
            continue
        try:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{place} {what}, and it cannot be removed ({error.strerror}); remove it") from None
        _say(f"{place} {what}; it is made anew")


def stamps_of(root: Path, files: Sequence[Path]) -> Fingerprint:
    """Return the stamps of ``files``, named by their paths below ``root``."""
    return [stamp_of(str(file.relative_to(root)), file.stat()) for file in files]


def stamp_of(name: str, stat: os.stat_result) -> Stamp:
    """Return the stamp of a file or folder from its ``stat`` result."""
    size = 0 if S_ISDIR(stat.st_mode) else stat.st_size
    return (name, size, stat.st_mtime_ns, stat.st_ctime_ns)


def _places(root: Path, split: str) -> list[Path]:
    name = f".imagenet-fast-{split}.index"
    with suppress(UserError):  # without a home directory there is no cache
        cached = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16] + name
        return [root / name, cache_dir() / "indexes" / cached]
    return [root / name]


def _read(place: Path, kind: Kind, stamps: Fingerprint) -> Index | str:
    """Return the index stored at ``place``, or why it is not valid; an empty string if there is none."""
    try:
        with np.load(place, allow_pickle=False) as file:  # a zip file, which has a checksum per part
            about = json.loads(file["about"].tobytes())
            columns = {name: file[name] for name in kind.columns}
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, NotImplementedError, RuntimeError,
            MemoryError, zipfile.BadZipFile):  # fmt: skip
        return "is damaged"
    if not isinstance(about, dict) or (about.get("version"), about.get("kind")) != (_VERSION, kind.name):
        return "is of another format or version"
    if about.get("stamps") != [list(stamp) for stamp in stamps]:
        return "is of files that have changed since"
    if any(columns[name].dtype.str != dtype or columns[name].ndim != 1 for name, dtype in kind.columns.items()):
        return "is damaged"
    return Index(about, columns)


def _write(partial: BinaryIO, place: Path, kind: Kind, stamps: Fingerprint, index: Index) -> None:
    """Write the index to ``partial``, which this process has locked, and rename it to ``place``.

    An error such as a full disk is reported but does not end the run.
    """
    about = json.dumps({**index.about, "version": _VERSION, "kind": kind.name, "stamps": stamps}).encode()
    try:
        partial.truncate(0)
        np.savez(partial, about=np.frombuffer(about, np.uint8), **dict[str, Any](index.columns))
        partial.flush()
        Path(partial.name).replace(place)
    except OSError as error:
        _say(f"{place} cannot be written ({error.strerror}); the next run will look through the data again")
        with suppress(OSError):
            Path(partial.name).unlink()


@contextmanager
def _alone(place: Path) -> Iterator[BinaryIO | None]:
    """Yield the locked file that is to become ``place``, or None if it cannot be created or locked.

    A process that waits gets its lock on a file that has been renamed or removed meanwhile, so it opens the path again.
    Only a killed process leaves a file behind, and the next process reuses it.
    """
    path = place.with_name(f"{place.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except OSError:  # no write permission, or a file system without locks
        yield None
        return
    try:
        yield file
    finally:
        with suppress(OSError):
            if _is(file, path):
                path.unlink()
        with suppress(OSError):  # on a full disk it tries again to write what is left in its buffer
            file.close()


def _take(path: Path) -> BinaryIO:
    """Open and lock ``path``, and wait while another process holds it. Raises OSError."""
    while True:
        file = open(path, "r+b", opener=_creating)  # noqa: SIM115  (whoever calls closes it)
        try:
            # by hand: filelock would open the file a second time, but the one locked here is written and then renamed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(file, path):
                return file
        except BlockingIOError:
            time.sleep(0.05)
            moving()
        except OSError:
            file.close()
            raise
        file.close()


def _creating(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _is(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _settled(stamp: Callable[[], Fingerprint]) -> Fingerprint:
    """Return stamps that are old enough for any later change to get another time."""
    stamps = stamp()
    newest = max((max(times) for _, _, *times in stamps), default=0) / 1e9
    if abs(time.time() - newest) < _TICK_S:
        time.sleep(_TICK_S)
        stamps = stamp()
    return stamps


def moving() -> None:
    """Report that this rank still makes progress, as listing a million files may seem to hang.

    A process that is not a rank has not imported the heartbeat module, and is not made to import torch for it.
    """
    watched = sys.modules.get("imagenet_fast.distributed.heartbeat")
    if watched is not None:
        watched.here.enter(watched.here.at[1])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
