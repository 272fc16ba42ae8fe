"""The index of where each image of a split lies: built once, stored in a file, and reused until the data changes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.data.paths import cache_dir
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.errors import UserError

_VERSION = 6
_TICK_S = 0.02  # file systems' clocks advance in steps of up to 10 ms
_MANY = 100  # files or folders; the user is told when this many are scanned
_THREADS = 16  # they wait for a file server

Item = TypeVar("Item")
Found = TypeVar("Found")

Stamps = list[tuple[str, int, int, int]]
"""The state of files or folders: path, size in bytes (0 for a folder), mtime in ns and ctime in ns.

Anyone can set the mtime to any value, and programs that copy do. The ctime cannot be set.
"""


@dataclass(frozen=True)
class Index:
    """A table with one row per image, and facts that hold for all images."""

    about: Mapping[str, Any]
    """Facts that hold for all images, as JSON values."""
    columns: Mapping[str, NDArray[Any]]
    """Columns by name. All except columns of bytes have [images] elements."""


def load_or_build_index(
    root: Path, split: str, dtypes: Mapping[str, str], paths: Sequence[Path], make: Callable[[], Index]
) -> Index:
    """Return the index of a split under ``root``: the stored one if it is valid, else a new one.

    A stored index is valid if it is not damaged and describes the data as it is now. It is stored beside the data, or
    in the cache directory if the data directory cannot be written. Ranks of a node take turns (``first_of_node``), so
    that one of them builds it and the others read it.

    Args:
        root: The data directory.
        split: The name of the split.
        dtypes: The columns that the index must have, with their dtypes.
        paths: The files or folders below ``root`` that the index describes.
        make: Builds a new index.
    """
    stamps, places = _stamps(root, paths), _places(root, split)
    for place in places:
        if (found := _read(place, dtypes, stamps)) is not None:
            return found
    if len(stamps) >= _MANY:
        print(f"looking through the {split} split of {root}, which has no index that is valid", file=sys.stderr)
    newest = max((max(times) for _, _, *times in stamps), default=0) / 1e9
    if abs(time.time() - newest) < _TICK_S:  # so that any later change gets another time
        time.sleep(_TICK_S)
        stamps = _stamps(root, paths)
    index = make()
    _write(places, stamps, index)
    return index


def _stamps(root: Path, paths: Sequence[Path]) -> Stamps:
    found = []
    for path in paths:
        stat = path.stat()
        size = 0 if S_ISDIR(stat.st_mode) else stat.st_size
        found.append((str(path.relative_to(root)), size, stat.st_mtime_ns, stat.st_ctime_ns))
    return found


def _places(root: Path, split: str) -> list[Path]:
    name = f".imagenet-fast-{split}.index"
    with suppress(UserError):  # without a home directory there is no cache
        cached = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16] + name
        return [root / name, cache_dir() / "indexes" / cached]
    return [root / name]


def _read(place: Path, dtypes: Mapping[str, str], stamps: Stamps) -> Index | None:
    """Return the index stored at ``place``; None if it is missing, damaged, of another version or of other files."""
    try:
        with np.load(place, allow_pickle=False) as file:  # a zip file, which has a checksum per part
            about = json.loads(file["about"].tobytes())
            columns = {name: file[name] for name in dtypes}
        described = about["version"], about["stamps"]
    except Exception:  # of a damaged file, zip, NumPy and JSON raise many types, zlib.error among them
        return None
    typed = all(columns[name].dtype.str == dtype and columns[name].ndim == 1 for name, dtype in dtypes.items())
    valid = typed and described == (_VERSION, [list(stamp) for stamp in stamps])
    return Index(about, columns) if valid else None


def _write(places: Sequence[Path], stamps: Stamps, index: Index) -> None:
    """Write the index to the first of ``places`` that can be written; that none can is reported, and ends no run."""
    about = json.dumps({**index.about, "version": _VERSION, "stamps": stamps}).encode()
    why: str | None = ""
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(place, shared=True) as partial, partial.open("xb") as file:
                np.savez(file, about=np.frombuffer(about, np.uint8), **dict[str, Any](index.columns))
            return
        except OSError as error:
            why = error.strerror
    print(f"{places[0]} cannot be written ({why}); the next run will look through the data again", file=sys.stderr)


def map_in_order(look: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
    """Yield ``look(item)`` of all items in order; it is called in threads, which mostly wait for the disk."""
    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for found in threads.map(look, items):
                here.move()  # listing a million files may seem to hang
                yield found
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def digest_of(*parts: bytes | NDArray[np.int64]) -> str:
    """Return a hex digest of the ``parts`` that tell a split from others."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else part.astype("<i8").tobytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
