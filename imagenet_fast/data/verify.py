"""Decode every image of a data directory, in as many threads as there are cores."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.data.bad_images import QUARANTINE, prefix_of, quarantine_text, quarantined
from imagenet_fast.data.format_detection import SplitName, find_split, open_shards
from imagenet_fast.data.image_names import class_folders, look_into, read_file, shown
from imagenet_fast.data.imagefolder import deeper_images
from imagenet_fast.data.inspect_image import Look, examine
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.errors import UserError

_CHUNK = 64  # files per task of a thread


@dataclass(frozen=True)
class Verified:
    """The result of ``verify``.

    Files are named by their paths below the data directory. Images in shards are named by the shard's path and their
    place there.
    """

    counts: dict[str, dict[str, int]]
    """Number of good images by split and class."""
    bad: dict[str, str]
    """The error of each quarantined file, by name."""
    kinds: dict[str, int]
    """Number of quarantined files by kind."""
    duplicates: list[list[str]]
    """Groups of images with the same bytes."""
    leaks: list[list[str]]
    """Groups of duplicates that are in both the training and the validation split."""
    contradictions: list[list[str]]
    """Groups of duplicates that are in several classes."""
    passed_over: dict[str, list[str]]
    """Paths in or beside class folders that are not trained on as images, by what they are."""
    unlisted: str = ""
    """The reason why the list of bad files could not be written, if it had to be; else empty."""


@dataclass(frozen=True)
class _Lot:
    """The files of one split, numbered from 0."""

    split: str
    classes: list[str]
    labels: NDArray[np.int64]
    """[files], indices into ``classes``."""
    name: Callable[[int], str]
    """Function that returns a file's name below the data directory."""
    read: Callable[[int], bytes]
    passed_over: dict[str, list[str]] = field(default_factory=dict)
    """Paths that are not trained on, as in ``Verified``."""


class _Lots:
    """Several splits, numbered consecutively."""

    def __init__(self, lots: Sequence[_Lot]) -> None:
        self.lots = lots
        self._begins = np.cumsum([0, *(len(lot.labels) for lot in lots)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def at(self, index: int) -> tuple[_Lot, int]:
        number = int(np.searchsorted(self._begins, index, side="right")) - 1
        return self.lots[number], index - int(self._begins[number])

    def name(self, index: int) -> str:
        lot, own = self.at(index)
        return lot.name(own)

    def class_of(self, index: int) -> tuple[str, str]:
        """Return the split and the class of a file."""
        lot, own = self.at(index)
        return lot.split, lot.classes[lot.labels[own]]


def verify(root: Path, workers: int | None = None, must_list: bool = True) -> Verified:
    """Decode all images under ``root``, and write the list of bad ones there, which `train` leaves out.

    Args:
        root: The data directory.
        workers: Number of threads; None for one per core.
        must_list: Whether it is an error if the list cannot be written. It need not be written if the same list is
            there already.

    Raises:
        UserError: There is nothing to read, a shard's index cannot be built, or the list cannot be written although
            ``must_list`` is set.
    """
    files = _Lots([lot for split in get_args(SplitName) if (lot := _lot(root, split)) is not None])
    if not len(files):
        raise UserError(
            f"{root} holds no images in train/<class> or val/<class>, and no shards; give another with --data DIR"
        )
    if must_list and not (root / QUARANTINE).is_file():
        _refuse(root, _tried(lambda: tempfile.TemporaryFile(dir=root).close()))  # now, not after an hour of decoding
    digests = np.zeros(len(files), np.uint64)
    good = np.ones(len(files), np.bool_)
    bad: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for index, look in enumerate(_looks(files, workers or usable_cores())):
        digests[index] = look.digest
        if look.kind:
            good[index] = False
            bad[files.name(index)] = f"{look.kind}: {look.what}" if look.what else look.kind
            kinds[look.kind] += 1
    unlisted = _tried(lambda: atomic_write_text(root / QUARANTINE, quarantine_text(bad), fsync=True))
    if unlisted and _listed(root) == bad:
        unlisted = ""
    if must_list:
        _refuse(root, unlisted)
    same = _duplicates(digests, np.flatnonzero(good))

    def named(groups: Iterable[list[int]]) -> list[list[str]]:
        return sorted([files.name(index) for index in group] for group in groups)

    return Verified(
        _counts(files, good), bad, dict(kinds), named(same),
        named(group for group in same if len({files.class_of(index)[0] for index in group}) > 1),
        named(group for group in same if len({files.class_of(index)[1] for index in group}) > 1),
        _passed_over(files), unlisted,
    )  # fmt: skip


def _tried(write: Callable[[], None]) -> str:
    """Call ``write`` and return why it failed; an empty string if it succeeded."""
    try:
        write()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _refuse(root: Path, reason: str) -> None:
    """Raise UserError if there is a ``reason`` why the list cannot be written."""
    if reason:
        raise UserError(
            f"{root / QUARANTINE} cannot be written ({reason}); make {root} writable, or give --json FILE, which does "
            "without it"
        )


def _listed(root: Path) -> dict[str, str] | None:
    """Return the list that is there already, or None if it cannot be read."""
    try:
        return quarantined(root)
    except (UserError, OSError):
        return None


def _lot(root: Path, split: SplitName) -> _Lot | None:
    """Return the files of a split, or None if it has none."""
    found = find_split(root, split)
    if found.format == "folder":
        return _folders(root, split)
    shards = open_shards(root, split, found)
    prefix = prefix_of(root)
    return _Lot(split, shards.classes, shards.labels, lambda i: shards.name(i).removeprefix(prefix), shards.read)


def _folders(root: Path, split: str) -> _Lot | None:
    """Return the files of a split that loaders accept as images, and what they pass over."""
    if not (root / split).is_dir():
        return None
    classes, contents = class_folders(root / split), look_into(root / split)
    hidden = [f"{split}/{name}" for name in contents.hidden]
    files: list[str] = []
    labels: list[int] = []
    others: list[str] = []
    apart = [f"{split}/{file}" for file in contents.images]
    for label, name in enumerate(classes):
        contents = look_into(root / split / name)
        files += [f"{split}/{name}/{file}" for file in contents.images]
        labels += [label] * len(contents.images)
        others += [f"{split}/{name}/{file}" for file in contents.others]
        apart += deeper_images(root / split / name, contents, f"{split}/{name}")
    passed_over = {
        "images that lie in no class's own folder": apart,
        "files that are no images by their names": others,
        "hidden folders, or those of systems": hidden,
    }
    return _Lot(
        split, classes, np.array(labels, np.int64), files.__getitem__, lambda i: read_file(f"{root / files[i]}"),
        passed_over,
    )  # fmt: skip


def _passed_over(files: _Lots) -> dict[str, list[str]]:
    """Return what is passed over in all splits, without empty lists."""
    found: dict[str, list[str]] = {}
    for lot in files.lots:
        for what, paths in lot.passed_over.items():
            found[what] = found.get(what, []) + paths
    return {what: paths for what, paths in found.items() if paths}


def _looks(files: _Lots, workers: int) -> Iterator[Look]:
    """Yield the result for each file, in order."""
    stop = threading.Event()

    def look(begin: int) -> list[Look]:
        found = []
        for index in range(begin, min(begin + _CHUNK, len(files))):
            if stop.is_set():
                raise CancelledError
            found.append(_look(*files.at(index)))
        return found

    with ThreadPoolExecutor(workers) as pool, progress_bars("images") as bars, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # warnings about large images or odd EXIF
        task = bars.add_task("decoding", total=len(files))
        try:
            for looks in pool.map(look, range(0, len(files), _CHUNK)):
                bars.advance(task, len(looks))
                yield from looks
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _look(lot: _Lot, index: int) -> Look:
    try:
        content = lot.read(index)
    except (OSError, UserError) as error:
        what = error.strerror or "" if isinstance(error, OSError) else str(error)
        return Look("unreadable", what, 0)
    return examine(lot.name(index).rpartition("/")[2], content)


def _counts(files: _Lots, good: NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    begin = 0
    for lot in files.lots:
        labels = lot.labels[good[begin : begin + len(lot.labels)]]
        there = np.unique(lot.labels).tolist()
        of_class = np.bincount(labels, minlength=len(lot.classes)).tolist()
        counts[lot.split] = {lot.classes[label]: of_class[label] for label in there}
        begin += len(lot.labels)
    return counts


def _duplicates(digests: NDArray[np.uint64], good: NDArray[np.int64]) -> list[list[int]]:
    """Return groups of the same content among the images ``good``, each in rising order."""
    order = good[np.argsort(digests[good], kind="stable")]
    same_as_next = digests[order][1:] == digests[order][:-1]
    groups: list[list[int]] = []
    last = -1
    for place in np.flatnonzero(same_as_next).tolist():
        if place != last:
            groups.append([int(order[place])])
        groups[-1].append(int(order[place + 1]))
        last = place + 1
    return groups


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
    for what, paths in found.passed_over.items():
        yield f"ignored: {len(paths)} {what}, such as {min(paths)}"
    if found.duplicates:
        yield (
            f"kept, but look at: {len(found.duplicates)} images that are there several times, "
            f"{len(found.contradictions)} of them in several classes, {len(found.leaks)} in both splits"
        )
        for same in (found.leaks or found.contradictions or found.duplicates)[:1]:
            yield f"  {' = '.join(same[:3])}"
    for kind, count in sorted(found.kinds.items()):
        first = next(path for path, what in found.bad.items() if what.startswith(kind))
        yield f"bad: {count} {kind}, such as {first}"
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
    """Return the result as JSON values, without the counts by kind and ``unlisted``."""
    return {
        "classes": found.counts,
        "quarantine": found.bad,
        "duplicates": found.duplicates,
        "in_both_splits": found.leaks,
        "in_several_classes": found.contradictions,
        "passed_over": found.passed_over,
    }
