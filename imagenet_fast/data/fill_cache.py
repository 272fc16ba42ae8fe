"""Put every image into a cache before training, for ``imagenet-fast data cache``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from imagenet_fast.data.decode import ImageDecodeError
from imagenet_fast.data.decoded_cache import Cache, open_cache
from imagenet_fast.data.format_detection import open_training, open_validation
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.errors import UserError, warn

_AT_ONCE = 64  # images per job: to schedule each by itself would take as long as to decode it


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    for split, images in (("train", open_training(data)), ("val", open_validation(data))):
        cache = open_cache(out, split, images, side)
        with Progress(*columns, console=Console(stderr=True)) as bar:
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
