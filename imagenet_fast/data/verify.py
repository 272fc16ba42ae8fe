"""Decode every image of a data directory, in as many threads as there are cores."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.folders import class_folders, list_split, read_file, shown
from imagenet_fast.data.pixels import NO_IMAGE, ImageDecodeError, decode, kind_of
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.data.quarantine import QUARANTINE, prefix_of, write_quarantine
from imagenet_fast.data.source import SplitName, find_split, in_sentences, open_shards
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.errors import UserError

_CHUNK = 64  # files per task of a thread
_APPLE_DOUBLE = b"\x00\x05\x16\x07"


@dataclass(frozen=True)
class Verified:
    """The result of ``verify``.

    Files are named by their paths below the data directory. Images in shards are named by the shard's path and their
    place there.
    """

    counts: dict[str, dict[str, int]]
    """Number of good images by split and class."""
    bad: dict[str, str]
    """The error of each quarantined file, by name: its kind, and after a colon what the decoder says."""
    duplicates: list[list[str]]
    """Groups of images with the same bytes."""
    leaks: list[list[str]]
    """Groups of duplicates that are in both the training and the validation split."""
    unlisted: str = ""
    """The reason why the list of bad files cannot be written; else empty."""


@dataclass(frozen=True)
class _SplitFiles:
    """The files of one split, numbered from 0."""

    split: str
    classes: list[str]
    labels: NDArray[np.int64]
    """[files], indices into ``classes``."""
    name: Callable[[int], str]
    """Function that returns a file's name below the data directory."""
    read: Callable[[int], bytes]


class _AllFiles:
    """The files of several splits, numbered consecutively."""

    def __init__(self, splits: Sequence[_SplitFiles]) -> None:
        self.splits = splits
        self.begins = np.cumsum([0, *(len(files.labels) for files in splits)])

    def __len__(self) -> int:
        return int(self.begins[-1])

    def at(self, index: int) -> tuple[_SplitFiles, int]:
        number = int(np.searchsorted(self.begins, index, side="right")) - 1
        return self.splits[number], index - int(self.begins[number])

    def name(self, index: int) -> str:
        files, own = self.at(index)
        return files.name(own)


class _Checked(NamedTuple):
    """The result of checking one file."""

    fault: str
    """Its kind, and the decoder's message; empty for a good image."""
    digest: int
    """64-bit hash of the content."""


def verify(root: Path, workers: int | None = None, must_list: bool = True) -> Verified:
    """Decode all images under ``root``, and write the list of bad ones there, which `train` leaves out.

    Args:
        root: The data directory.
        workers: Number of threads; None for one per core.
        must_list: Whether it is an error if the list cannot be written.

    Raises:
        UserError: There is nothing to read, a shard's index cannot be built, or the list cannot be written although
            ``must_list`` is set.
    """
    files = _AllFiles([found for split in get_args(SplitName) if (found := _files_of(root, split)) is not None])
    if not len(files):
        raise UserError(
            f"{root} holds no images in train/<class> or val/<class>, and no shards; give another with --data DIR"
        )
    unlisted = _tried(root, must_list, lambda: tempfile.TemporaryFile(dir=root).close())  # not after an hour
    bad, good, digests = _check_all(files, workers or usable_cores())
    unlisted = unlisted or _tried(root, must_list, lambda: write_quarantine(root, bad))
    same = _duplicates(digests, np.flatnonzero(good))
    leaks = [group for group in same if len({files.at(index)[0].split for index in group}) > 1]
    duplicates, in_both = (sorted([files.name(index) for index in group] for group in some) for some in (same, leaks))
    return Verified(_counts(files, good), bad, duplicates, in_both, unlisted)


def _tried(root: Path, must: bool, write: Callable[[], None]) -> str:
    """Call ``write`` and return why it failed, as text; raise UserError instead if it ``must`` not."""
    try:
        write()
    except OSError as error:
        if must:
            raise UserError(
                f"{root / QUARANTINE} cannot be written ({error.strerror}); make {root} writable, or give --json FILE, "
                "which does without it"
            ) from None
        return error.strerror or str(error)
    return ""


@in_sentences
def _files_of(root: Path, split: SplitName) -> _SplitFiles | None:
    """Return the files of a split that loaders take for images, or None if it has none."""
    found = find_split(root, split)
    if found.format != "folder":
        shards, prefix = open_shards(root, split, found), prefix_of(root)
        return _SplitFiles(
            split, shards.classes, shards.labels, lambda i: shards.name(i).removeprefix(prefix), shards.read
        )
    if not (root / split).is_dir():
        return None
    classes = class_folders(root / split)
    images = [contents.images for contents in list_split(root / split, classes).classes.values()]
    names = [f"{split}/{name}/{file}" for name, files in zip(classes, images, strict=True) for file in files]
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in images])
    return _SplitFiles(split, classes, labels, names.__getitem__, lambda i: read_file(f"{root / names[i]}"))


def _check_all(files: _AllFiles, workers: int) -> tuple[dict[str, str], NDArray[np.bool_], NDArray[np.uint64]]:
    """Return the bad files by name, whether each file is good, and the hash of its content."""
    bad, good, digests = {}, np.ones(len(files), np.bool_), np.zeros(len(files), np.uint64)
    stop = threading.Event()

    def check(begin: int) -> list[_Checked]:
        found = []
        for index in range(begin, min(begin + _CHUNK, len(files))):
            if stop.is_set():
                raise CancelledError
            found.append(_check(*files.at(index)))
        return found

    with warnings.catch_warnings(), progress_bars("images") as bars, ThreadPoolExecutor(workers) as pool:
        warnings.filterwarnings("ignore", module="PIL")  # warnings about large images or odd EXIF
        task = bars.add_task("decoding", total=len(files))
        begins = range(0, len(files), _CHUNK)
        try:
            for begin, found in zip(begins, pool.map(check, begins), strict=True):
                bars.advance(task, len(found))
                for index, (fault, digest) in enumerate(found, begin):
                    digests[index], good[index] = digest, not fault
                    if fault:
                        bad[files.name(index)] = fault
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return bad, good, digests


def _check(files: _SplitFiles, index: int) -> _Checked:
    """Decode a file as loaders do, so that both agree on what is bad."""
    try:
        content = files.read(index)
    except (OSError, UserError) as error:
        return _Checked(f"unreadable: {error.strerror if isinstance(error, OSError) else error}", 0)
    return _Checked(_fault(content), int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()))


def _fault(content: bytes) -> str:
    if content.startswith(_APPLE_DOUBLE):
        return "AppleDouble"
    if not content:
        return "empty"
    try:
        decode(content)
    except ImageDecodeError as error:
        if str(error) == NO_IMAGE:
            return "damaged" if kind_of(content) else "no image"
        return f"{'truncated' if 'truncated' in str(error).lower() else 'damaged'}: {error}"
    return ""


def _counts(files: _AllFiles, good: NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for of, begin in zip(files.splits, files.begins.tolist(), strict=False):
        labels = of.labels[good[begin : begin + len(of.labels)]]
        of_class = np.bincount(labels, minlength=len(of.classes)).tolist()
        counts[of.split] = {of.classes[label]: of_class[label] for label in np.unique(of.labels).tolist()}
    return counts


def _duplicates(digests: NDArray[np.uint64], good: NDArray[np.int64]) -> list[list[int]]:
    """Return groups of the same content among the images ``good``, each in rising order."""
    order = good[np.argsort(digests[good], kind="stable")]
    changes = np.flatnonzero(np.diff(digests[order])) + 1
    begins, ends = np.concatenate([[0], changes]), np.concatenate([changes, [len(order)]])
    several = ends - begins > 1
    return [order[begin:end].tolist() for begin, end in zip(begins[several], ends[several], strict=True)]


def summary(found: Verified, root: Path) -> Iterator[str]:
    """Yield lines for the user that fit a screen and can be printed."""
    return map(shown, _summary(found, root))


def _summary(found: Verified, root: Path) -> Iterator[str]:
    for split, classes in found.counts.items():
        counts = sorted(classes.values())
        if not counts:
            yield f"{split:<5}  no images in class folders"
            continue
        yield (
            f"{split:<5}  {sum(counts)} images in {len(counts)} classes: {counts[0]} to {counts[-1]} in each, "
            f"median {counts[len(counts) // 2]}"
        )
    if found.duplicates:
        yield (
            f"kept, but look at: {len(found.duplicates)} images that are there several times, {len(found.leaks)} of "
            f"them in both splits: {' = '.join((found.leaks or found.duplicates)[0][:3])}"
        )
    kinds = {path: what.partition(":")[0] for path, what in found.bad.items()}
    for kind, count in sorted(Counter(kinds.values()).items()):
        yield f"bad: {count} {kind}, such as {next(path for path in kinds if kinds[path] == kind)}"
    empty = [f"{split}/{name}" for split, classes in found.counts.items() for name, n in classes.items() if not n]
    if empty:
        yield f"without images: {len(empty)} classes, such as {empty[0]}"
    if found.unlisted:
        yield f"{root / QUARANTINE} cannot be written ({found.unlisted}): `train` will not leave out the bad files"
    elif found.bad:
        yield f"`train` and `eval` leave out the bad files; they are listed in {root / QUARANTINE}"
    if not found.bad:
        yield "every file is an image that can be decoded"


def as_json(found: Verified) -> dict[str, Any]:
    """Return the result as JSON values, without ``unlisted``."""
    return {
        "classes": found.counts,
        "quarantine": found.bad,
        "duplicates": found.duplicates,
        "in_both_splits": found.leaks,
    }
