"""Cache decoded images on a disk of the node: the first epoch fills it, and all ranks of the node share it.

A loader returns the same pixels with and without the cache, also while it is filled. Crops are always made from an
image that was decoded and shrunk (``data.cache_side``), whether just now or earlier. Labels are not cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import cv2
import numpy as np
from filelock import UnixFileLock
from PIL import Image

from imagenet_fast.data.decode import PIL_REFUSES, Pixels, decode
from imagenet_fast.data.format_detection import open_training, open_validation
from imagenet_fast.data.formats.shard_reader import Shards
from imagenet_fast.data.image_source import ImageDecodeError, ImageSource
from imagenet_fast.data.mmap_store import (
    INDEX,
    SYNCED,
    MmapImageStore,
    alone,
    bytes_taken,
    make_empty,
    read_alone,
    read_entries,
    restore_synced,
)
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.data.resize import shrunk, shrunk_size
from imagenet_fast.data.sampler import Order, TrainSampler
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.units import gigabytes

_VERSION = 1
_ABOUT = "about.json"
_MEASURED = 200
"""Number of images whose sizes are read, to estimate the size of all."""
_COMPARED = 16
"""Number of cached images that are decoded again and compared when a cache is opened."""
_SYNC_S = 60.0
_SPARE = 1.02

_AT_ONCE = 64  # images per job: to schedule each by itself would take as long as to decode it


def pixels_of(images: ImageSource, order: Order, data: ImageData) -> Callable[[int], Pixels]:
    """Return a function from an image's index to its pixels, which uses the cache if the recipe has one.

    The function raises ImageDecodeError if the image cannot be decoded, OSError if it cannot be read, and UserError if
    its shard is damaged.

    Raises:
        UserError: If the cache cannot be used.
    """
    if data.cache:
        split = "train" if isinstance(order, TrainSampler) else "val"
        return open_cache(Path(data.cache).expanduser(), split, images, data.cache_side).pixels
    return lambda index: _made(images, index, data.cache_side)


class Cache:
    """The cache of one split, which other processes may share. Thread-safe."""

    def __init__(self, folder: Path, images: ImageSource, side: int, kept: MmapImageStore, writable: bool) -> None:
        """Create the cache on top of an open store.

        Args:
            folder: Directory of the store.
            images: The images to cache.
            side: Shorter side in pixels that larger images are shrunk to; 0: they are not shrunk.
            kept: Store of the pixels.
            writable: Whether images can be added.
        """
        self.folder = folder
        self.images = images
        self.full = "" if writable else "it cannot be written"
        """Reason why no more images are added; empty while they are."""
        self._side = side
        self._kept = kept
        self._lock = Lock()
        self._synced_at = time.monotonic()

    @property
    def missing(self) -> list[int]:
        """Indices of the images that are not in the cache."""
        return np.flatnonzero(self._kept.entries == 0).tolist()

    def pixels(self, index: int) -> Pixels:
        """Return the pixels of image ``index``; if they are not in the cache, decode and add them.

        Raises:
            ImageDecodeError: If the image cannot be decoded.
            OSError: If the image cannot be read.
            UserError: If the shard that holds the image is damaged.
        """
        pixels = self._kept.read(index)
        if pixels is None:
            pixels = _made(self.images, index, self._side)
            if not self.full:
                self._keep(index, pixels)
        return pixels

    def sync(self) -> None:
        """Flush all cached images to the disk; ignore errors."""
        with suppress(OSError):  # then fewer images can be trusted after a crash of the node
            self._kept.sync()

    def _keep(self, index: int, pixels: Pixels) -> None:
        """Add an image, and flush the cache once a minute; if the disk is full, warn once and stop adding."""
        try:
            self._kept.write(index, pixels)
        except OSError as error:
            with self._lock:
                told, self.full = self.full, error.strerror or str(error)
            if not told:
                warn(
                    f"{self.folder} takes no more images ({self.full}): those that are not in it are decoded in each "
                    "epoch; free some space and start again, or give another data.cache"
                )
        with self._lock:
            late = time.monotonic() - self._synced_at > _SYNC_S
            if late:
                self._synced_at = time.monotonic()
        if late:  # in its own thread: it may take seconds, and decoding continues
            Thread(target=self.sync, name="sync", daemon=True).start()


def open_cache(root: Path, split: str, images: ImageSource, side: int) -> Cache:
    """Open the cache of a ``split`` under ``root``; create it if there is none that is whole and of these images.

    Before a new cache is filled, its expected size is printed to stderr. After a reboot, an existing cache keeps only
    what had been flushed to the disk.

    Args:
        root: Directory of the caches.
        split: Name of the split, "train" or "val".
        images: The images to cache.
        side: Shorter side in pixels that larger images are shrunk to; 0: they are not shrunk.

    Raises:
        UserError: If the disk lacks room, or if the cache cannot be created, written or opened, or if another run uses
            a cache that must be changed.
    """
    folder = root / f"{split}-{side or 'whole'}"
    with _one_at_a_time(folder) as writable:
        about = {"version": _VERSION, "pictures": len(images), "side": side, "names": _digest(images)}
        found = _about(folder)
        fault = "is not there" if found is None else _fault(folder, found, about, images, side)
        needed: int = found["bytes"] if found and not fault else 0
        current = found is not None and found.get("boot") == _boot()
        if fault and not writable:
            raise UserError(f"{folder} {fault} and cannot be written; give another data.cache")
        if writable and (fault or not current):
            if not _is_alone(folder):
                fault = fault or "is of before this node started"
                raise UserError(f"{folder} {fault}, and another run, or node, uses it; give another data.cache")
            if fault:
                needed = _check_room(folder, images, side)
                if found is not None:
                    print(f"{folder} {fault}: it is made anew", file=sys.stderr)
            try:
                if fault:
                    (folder / _ABOUT).unlink(missing_ok=True)
                    make_empty(folder, len(images))
                else:
                    restore_synced(folder, len(images))
                (folder / _ABOUT).write_text(
                    json.dumps({**about, "boot": _boot(), "bytes": needed}) + "\n", encoding="utf-8"
                )
            except OSError as error:
                raise UserError(f"{folder} cannot be made ({error.strerror}); give another data.cache") from None
        try:
            kept = MmapImageStore(folder, len(images), INDEX if writable or current else SYNCED, writable, needed)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} cannot be opened ({error}); remove it, or give another data.cache") from None
    cache = Cache(folder, images, side, kept, writable)
    if writable:
        _settle(cache, needed)
    return cache


def _made(images: ImageSource, index: int, side: int) -> Pixels:
    return shrunk(decode(images.read(index)), side)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Lock ``folder`` while a cache is opened or created there; yield whether this process may write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = UnixFileLock(folder / "lock", fallback_to_soft=False).acquire()  # raises where locks are not supported
    except OSError as error:
        if (folder / _ABOUT).is_file():
            yield False
            return
        raise UserError(f"{folder} cannot be made ({error.strerror}); give another data.cache") from None
    with held:
        yield True


def _about(folder: Path) -> dict[str, Any] | None:
    """Read the description written when the cache was created; None if there is none, {} if it is damaged."""
    try:
        found = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("bytes"), int) else {}


def _fault(folder: Path, found: dict[str, Any], about: dict[str, Any], images: ImageSource, side: int) -> str:
    """Return why the existing cache cannot be used, to follow its name in a message; empty if it can."""
    if not found:
        return "is damaged"
    if {key: found.get(key) for key in about} != about:
        return "is of other images or of an earlier version"
    try:
        entries = read_entries(folder, INDEX if found.get("boot") == _boot() else SYNCED, len(images))
        if entries is None:
            return "is damaged"
        there = np.flatnonzero(entries)
        for place in np.unique(np.linspace(0, len(there) - 1, _COMPARED).astype(int)) if len(there) else ():
            index = int(there[place])
            kept = read_alone(folder, entries.item(index))
            with suppress(OSError, ImageDecodeError):  # an image that cannot be read now says nothing about the cache
                if not np.array_equal(kept, _made(images, index, side)):
                    return "has other pixels than the images have now"
    except (OSError, ValueError):
        return "is damaged"
    return ""


def _digest(images: ImageSource) -> str:
    """Return a digest of all names in order, with their folders' real paths: links to the data do not matter.

    Of images in shards the shards' names do; a million names inside them would take minutes.
    """
    digest = hashlib.sha256()
    if isinstance(images, Shards):
        digest.update(images.digest().encode())
        digest.update(b"\0".join(os.fsencode(os.path.realpath(file)) for file in images.files))
        return digest.hexdigest()
    real: dict[str, str] = {}
    for index in range(len(images)):
        folder, slash, name = images.name(index).rpartition("/")
        if folder not in real:
            real[folder] = os.path.realpath(folder + slash)
        digest.update(os.fsencode(f"{real[folder]}/{name}") + b"\0")
    return digest.hexdigest()


def _boot() -> str:
    """Return an id of the node's current boot; what was not flushed to the disk before a reboot is lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _is_alone(folder: Path) -> bool:
    try:
        return alone(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be opened ({error.strerror}); give another data.cache") from None


def _check_room(folder: Path, images: ImageSource, side: int) -> int:
    """Print and return how many bytes all images will take; raise UserError if the disk has fewer."""
    sizes = list(some_sizes(images, _MEASURED))

    def taken(side: int) -> int:
        """Estimate the bytes of all images at this ``side``, from a sample."""
        shapes = (shrunk_size(height, width, side) for height, width in sizes)
        mean = sum(3 * height * width for height, width in shapes) / max(1, len(sizes))
        return round(_SPARE * mean * len(images))

    free = shutil.disk_usage(folder).free + bytes_taken(folder)  # existing pixels will be deleted
    needed = taken(side)
    of = f"{len(images)} images, {f'with a shorter side of at most {side}' if side else 'as large as they are'}, "
    if needed > free:
        fitting = next((less for less in range(side or 1024, 0, -16) if taken(less) <= free), 0)
        instead = f", which would do for a data.cache_side of {fitting}" if fitting else ""
        raise UserError(
            f"{of}take about {gigabytes(needed)} in {folder}, and its disk has {gigabytes(free)} free{instead}; "
            "free some, or give another data.cache"
        )
    print(f"{of}will take about {gigabytes(needed)} in {folder}; {gigabytes(free)} are free", file=sys.stderr)
    return needed


def some_sizes(images: ImageSource, count: int) -> Iterator[tuple[int, int]]:
    """Yield (height, width) of ``count`` images spread over the split, without those that cannot be read or opened."""
    for index in np.unique(np.linspace(0, len(images) - 1, count).astype(int)).tolist():
        with suppress(UserError, *PIL_REFUSES), Image.open(BytesIO(images.read(index))) as image:
            yield image.height, image.width


def _settle(cache: Cache, bytes_expected: int) -> None:
    """Flush what an earlier run left unflushed, and warn if the disk has no room for the missing images."""
    missing, images = len(cache.missing), len(cache.images)
    if missing < images:
        Thread(target=cache.sync, name="sync", daemon=True).start()
        free, needed = shutil.disk_usage(cache.folder).free, bytes_expected * missing // images
        if needed > free and os.environ.get("LOCAL_RANK", "0") == "0":
            warn(
                f"{cache.folder} lacks {missing} of {images} images, about {gigabytes(needed)}, and its "
                f"disk has {gigabytes(free)} free; some will be decoded in every epoch"
            )


def fill_caches(data: Path, out: Path, side: int, threads: int) -> None:
    """Fill the caches of both splits under ``data``, with a progress bar on stderr.

    Args:
        data: Data directory.
        out: Directory of the caches.
        side: Shorter side in pixels that larger images are shrunk to; 0: they are not shrunk.
        threads: Number of decoding threads.

    Raises:
        UserError: If a split or its cache cannot be opened (see ``open_cache``), or the disk is full.
    """
    cv2.setNumThreads(0)  # we run our own threads
    for split, images in (("train", open_training(data)), ("val", open_validation(data))):
        cache = open_cache(out, split, images, side)
        with progress_bars("images") as bar:
            task = bar.add_task(split, total=len(images), completed=len(images) - len(cache.missing))
            for done in fill(cache, threads):
                bar.advance(task, done)


def fill(cache: Cache, threads: int) -> Iterator[int]:
    """Add the missing images to ``cache``. Bad ones are named in a warning and left out.

    Yields:
        The number of images processed since the last time.

    Raises:
        UserError: If the cache takes no more images.
    """

    def add(images: list[int]) -> Job:
        for index in images:
            try:
                cache.pixels(index)
            except (ImageDecodeError, OSError) as error:
                warn(f"{cache.images.name(index)} cannot be decoded ({error}): it is left out")
            except UserError as error:  # from a damaged shard; its message says where
                warn(f"{error}; the image is left out")
            yield

    missing = cache.missing
    parts = (missing[begin : begin + _AT_ONCE] for begin in range(0, len(missing), _AT_ONCE))
    for part in prefetched(((part, [add(part)]) for part in parts), threads, 2 * threads):
        if cache.full:
            raise UserError(f"{cache.folder} is not whole ({cache.full}); free some space and run this again")
        yield len(part)
    cache.sync()
