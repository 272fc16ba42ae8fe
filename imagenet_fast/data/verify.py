"""Decode every image of a data directory, in as many threads as there are cores."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from imagenet_fast.data.folders import ImageFolder, every_image
from imagenet_fast.data.pixels import NO_IMAGE, ImageDecodeError, decode, kind_of
from imagenet_fast.data.quarantine import QUARANTINE, prefix_of, write_quarantine
from imagenet_fast.data.shards import Shards
from imagenet_fast.data.source import SplitName, find_shards, in_sentences, open_shards, patiently
from imagenet_fast.distributed.cores import usable_cores
from imagenet_fast.errors import UserError
from imagenet_fast.progress import progress_bars

_CHUNK = 64  # files per task of a thread
_SAID = {"truncated": "truncated", "exceeds limit": "too large"}  # kinds of faults, by what decoders say


@dataclass(frozen=True)
class Verified:
    """The result of ``verify``.

    Files are named by their paths below the data directory. Images in shards are named by the shard's path and their
    place there.
    """

    classes: dict[str, dict[str, int]]
    """Number of good images by split and class."""
    quarantine: dict[str, str]
    """The error of each quarantined file, by name: its kind, and after a colon what the decoder says."""
    duplicates: list[list[str]]
    """Groups of images with the same bytes."""
    in_both_splits: list[list[str]]
    """Groups of duplicates that are in both the training and the validation split."""
    unlisted: str = ""
    """The reason why the list of bad files cannot be written; else empty."""


_Images = ImageFolder | Shards
_File = tuple[str, _Images, int]
"""An image's split, by name and as it is opened, and the number of the image there."""


def verify(root: Path, workers: int | None = None, must_list: bool = True) -> Verified:
    """Decode all images under ``root``, and write the list of bad ones there, which `train` leaves out.

    Raises:
        UserError: There is nothing to read, a shard's index cannot be built, or the list cannot be written although
            it ``must_list``.
    """
    splits = {split: images for split in get_args(SplitName) if (images := _images_of(root, split)) is not None}
    files = [(split, images, index) for split, images in splits.items() for index in range(len(images))]
    prefix = prefix_of(root)
    if not files:
        raise UserError(
            f"{root} holds no images in train/<class> or val/<class>, and no shards; give another with --data DIR"
        )
    unlisted = ""
    try:
        tempfile.TemporaryFile(dir=root).close()  # to know it now, and not after an hour
    except OSError as error:
        if must_list:
            raise UserError(
                f"{root / QUARANTINE} cannot be written ({error.strerror}); make {root} writable, or give --json FILE, "
                "which does without it"
            ) from None
        unlisted = error.strerror or str(error)
    bad: dict[str, str] = {}
    counts = {split: {of.classes[label]: 0 for label in np.unique(of.labels).tolist()} for split, of in splits.items()}
    first: dict[int, int] = {}
    """The first file of each content, by the hash of it."""
    copies: dict[int, list[int]] = defaultdict(list)
    with closing(_checked(files, workers or usable_cores())) as checked:
        for number, fault, digest in checked:
            split, of, index = files[number]
            if fault:
                bad[of.name(index).removeprefix(prefix)] = fault
                continue
            counts[split][of.classes[of.labels[index]]] += 1
            if (original := first.setdefault(digest, number)) != number:
                copies[original].append(number)
    if not unlisted:
        with in_sentences(root / QUARANTINE):
            write_quarantine(root, bad)
    same = [[files[number] for number in (original, *others)] for original, others in copies.items()]
    leaks = [group for group in same if len({split for split, _, _ in group}) > 1]
    duplicates, in_both = (
        sorted([of.name(index).removeprefix(prefix) for _, of, index in group] for group in some)
        for some in (same, leaks)
    )
    return Verified(counts, bad, duplicates, in_both, unlisted)


@in_sentences()
def _images_of(root: Path, split: SplitName) -> _Images | None:
    """Open all that loaders take for images of a split, or return None if it has no folder; a class may be empty."""
    if shards := find_shards(root, split):
        return open_shards(root, split, shards)
    return every_image(root / split) if (root / split).is_dir() else None


def _checked(files: Sequence[_File], workers: int) -> Generator[tuple[int, str, int], None, None]:
    """Yield each file's number, its fault, empty for a good image, and a 64-bit hash of its content.

    Files that could not be read are tried again when all others have been: their server may have been away.
    """
    stop, unread = threading.Event(), list[int]()

    def check(begin: int) -> list[tuple[int, str, int]]:
        found = []
        for number in range(begin, min(begin + _CHUNK, len(files))):
            if stop.is_set():
                raise CancelledError
            _, images, index = files[number]
            try:
                found.append((number, *patiently(images, index, partial(_check, images), waits=False)))
            except OSError:
                unread.append(number)
        return found

    with warnings.catch_warnings(), progress_bars("images") as bars, ThreadPoolExecutor(workers) as pool:
        warnings.filterwarnings("ignore", module="PIL")  # warnings about large images or odd EXIF
        task = bars.add_task("decoding", total=len(files))
        try:
            for found in pool.map(check, range(0, len(files), _CHUNK)):
                bars.advance(task, len(found))
                yield from found
            for number in unread:
                _, images, index = files[number]
                try:
                    yield number, *patiently(images, index, partial(_check, images))
                except OSError as error:
                    raise UserError(
                        f"{images.name(index)} cannot be read ({error.strerror or error}), and {QUARANTINE} is as it "
                        "was; put that right, or take that file away"
                    ) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _check(images: _Images, index: int) -> tuple[str, int]:
    """Decode a file as loaders do, so that both agree on what is bad. Raises OSError if it cannot be read."""
    content = b""
    try:
        content = images.read(index)
        fault = "" if content else "empty"
        if content:
            decode(content)
    except ImageDecodeError as error:
        kinds = (kind for said, kind in _SAID.items() if said in str(error).lower())
        fault = f"{next(kinds, 'damaged')}: {error}"
        if str(error) == NO_IMAGE:
            fault = "damaged" if kind_of(content) else "no image"
    return fault, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def summary(found: Verified, root: Path) -> Iterator[str]:
    """Yield lines for the user that fit a screen; names in them may not be printable."""
    for split, classes in found.classes.items():
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
            f"kept, but look at: {len(found.duplicates)} images that are there several times, "
            f"{len(found.in_both_splits)} of them in both splits: "
            f"{' = '.join((found.in_both_splits or found.duplicates)[0][:3])}"
        )
    kinds = {path: what.partition(":")[0] for path, what in found.quarantine.items()}
    for kind, count in sorted(Counter(kinds.values()).items()):
        yield f"bad: {count} {kind}, such as {next(path for path in kinds if kinds[path] == kind)}"
    empty = [f"{split}/{name}" for split, classes in found.classes.items() for name, n in classes.items() if not n]
    if empty:
        yield f"without images: {len(empty)} classes, such as {empty[0]}"
    if found.unlisted:
        yield f"{root / QUARANTINE} cannot be written ({found.unlisted}): `train` will not leave out the bad files"
    elif found.quarantine:
        yield f"`train` and `eval` leave out the bad files; they are listed in {root / QUARANTINE}"
    if not found.quarantine:
        yield "every file is an image that can be decoded"
