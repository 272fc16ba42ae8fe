"""Where each image of a split lies: found out once, kept in a file, and believed as long as nothing has changed."""

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

_VERSION = 2
_TICK_S = 0.02  # file systems' clocks move in steps of up to 10 ms
_MANY = 100  # files or folders, of which a person is told that they are looked through

Stamp = tuple[str, int, int, int]
"""Of a file or a folder: its name, its size in bytes (of a folder 0), and when its content and when it itself was last
changed, in ns. The former can be set to whatever one likes, and is by those who copy; the latter cannot."""

Fingerprint = list[Stamp]
"""What an index is of."""


@dataclass(frozen=True)
class Index:
    """A table with a row an image, and what holds for all of them."""

    about: Mapping[str, Any]
    """As JSON has it."""
    columns: Mapping[str, NDArray[Any]]
    """By name; all but those of bytes have [images] elements."""


@dataclass(frozen=True)
class Kind:
    """What an index is one of: the format of the images, and the columns with their dtypes."""

    name: str
    columns: Mapping[str, str]


def load_or_build_index(
    root: Path, split: str, kind: Kind, stamp: Callable[[], Fingerprint], make: Callable[[], Index]
) -> Index:
    """The index of a split under ``root``: the one that is kept if it is whole and of what is there now, or a new one.

    It lies beside the data, or in the cache directory where that cannot be written. One process of all that ask makes
    it and the others wait; where nothing can be kept each makes its own. Raises what ``stamp`` and ``make`` raise.
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
            if isinstance(found, Index):  # another process was quicker
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


def check_kept(root: Path, split: str, kind: Kind, fault: Callable[[Index], str]) -> None:
    """Remove the index of a split under ``root`` that has a ``fault``: what is wrong with it, or nothing.

    For faults that stamps do not show. Raises UserError where it cannot be removed.
    """
    for place in _places(root, split):
        found = _read(place, kind, None)
        if not isinstance(found, Index) or not (what := fault(found)):
            continue
        try:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{place} {what}, and it cannot be removed ({error.strerror}); remove it") from None
        _say(f"{place} {what}; it is made anew")


def stamps_of(root: Path, files: Sequence[Path]) -> Fingerprint:
    """Of ``files`` under ``root``."""
    return [stamp_of(str(file.relative_to(root)), file.stat()) for file in files]


def stamp_of(name: str, stat: os.stat_result) -> Stamp:
    """By what the system says of it."""
    size = 0 if S_ISDIR(stat.st_mode) else stat.st_size
    return (name, size, stat.st_mtime_ns, stat.st_ctime_ns)


def _places(root: Path, split: str) -> list[Path]:
    name = f".imagenet-fast-{split}.index"
    with suppress(UserError):  # without a home there is no cache
        cached = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16] + name
        return [root / name, cache_dir() / "indexes" / cached]
    return [root / name]


def _read(place: Path, kind: Kind, stamps: Fingerprint | None) -> Index | str:
    """What is kept in ``place``, or why it is not believed; nothing where there is nothing. Without ``stamps`` it may
    be of whatever was there once."""
    try:
        with np.load(place, allow_pickle=False) as file:  # a zip, which holds a sum of each part
            about = json.loads(file["about"].tobytes())
            columns = {name: file[name] for name in kind.columns}
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, NotImplementedError, RuntimeError,
            MemoryError, zipfile.BadZipFile):  # fmt: skip
        return "is damaged"
    if not isinstance(about, dict) or (about.get("version"), about.get("kind")) != (_VERSION, kind.name):
        return "is of another format or version"
    if stamps is not None and about.get("stamps") != [list(stamp) for stamp in stamps]:
        return "is of files that have changed since"
    if any(columns[name].dtype.str != dtype or columns[name].ndim != 1 for name, dtype in kind.columns.items()):
        return "is damaged"
    return Index(about, columns)


def _write(partial: BinaryIO, place: Path, kind: Kind, stamps: Fingerprint, index: Index) -> None:
    """Into the file that this process has to itself, which then becomes ``place``. A full disk is not worth an end."""
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
    """The file that is to become ``place``, which no other process has meanwhile; None where there can be none.

    Whoever waits for it gets a lock on a file that has been moved away or removed, and looks again. Nothing stays
    behind but of a process that was killed, and the next one takes that.
    """
    path = place.with_name(f"{place.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except OSError:  # a folder that is not ours, a file system without locks
        yield None
        return
    with file:
        try:
            yield file
        finally:
            with suppress(OSError):
                if _is(file, path):
                    path.unlink()


def _take(path: Path) -> BinaryIO:
    """Open and lock it. Raises OSError."""
    while True:
        file = open(path, "r+b", opener=_creating)  # noqa: SIM115  (whoever calls closes it)
        try:
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
    """Stamps so old that whatever changes from now on gets another time."""
    stamps = stamp()
    newest = max((max(times) for _, _, *times in stamps), default=0) / 1e9
    if abs(time.time() - newest) < _TICK_S:
        time.sleep(_TICK_S)
        stamps = stamp()
    return stamps


def moving() -> None:
    """Say that this rank does not stand still, as one that lists a million files seems to.

    Whoever is no rank, and so has not imported what watches them, is not made to import torch for it.
    """
    watched = sys.modules.get("imagenet_fast.distributed.heartbeat")
    if watched is not None:
        watched.here.enter(watched.here.at[1])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
