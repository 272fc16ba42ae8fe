"""Load batches in threads while earlier ones are trained on; no GPU and no other process.

An image that cannot be decoded ends the run with an error that names it, if ``data.on_bad_image`` is "fail". With
"skip", the batch keeps its size:

- In training, another image replaces the bad one. It has its own label, but the bad image's window and flip. The
  choice is a function of (seed, epoch, image), so it is the same on any number of ranks.
- In an evaluation, no other image can replace it. A bad image is black and has the label -1, which no prediction
  equals. So it counts, as wrong.

An image whose file cannot be read is not bad: a server that is away for a moment would make every later evaluation
wrong. It is read again for some seconds, and then the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from threading import Event, Lock
from typing import TypeVar

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from imagenet_fast.data.device import Batch, copied, empty, moved
from imagenet_fast.data.order import BatchIndices, Order, Resolution, TrainSampler, augmentation_of, bits, resolution
from imagenet_fast.data.pixels import ImageDecodeError, Pixels, central_crop, decode, random_crop
from imagenet_fast.data.source import ImageSource, patiently
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.recipe.data_config import ImageData

T = TypeVar("T")

THREADS = "images"
"""First part of the threads' names."""

NO_CLASS = -1
"""Label of an image that is missing."""

_ATTEMPTS = 100

Drawn = tuple[NDArray[np.float64], bool]
"""The numbers [22] that were drawn for one image, and whether it is flipped."""

Job = Iterator[None]
"""Part of the work on a batch, in steps; it may be abandoned after any step."""


class StorageAway(JobAborted):
    """An image could not be read for some seconds, whose storage may come back."""


def prefetched(batches: Iterable[tuple[T, Sequence[Job]]], threads: int, depth: int) -> Generator[T, None, None]:
    """Yield each batch in order once all its jobs are done, while threads work on the next ``depth`` batches.

    An exception in a job is raised here when it is its batch's turn. If the iterator is closed or dropped, the threads
    end after their current step.
    """
    stopped = Event()

    def work(job: Job) -> None:
        for _ in job:
            if stopped.is_set():
                return

    pool = ThreadPoolExecutor(threads, THREADS)
    begun: deque[tuple[T, list[Future[None]]]] = deque()
    try:
        for batch, jobs in batches:
            begun.append((batch, [pool.submit(work, job) for job in jobs]))
            if len(begun) > depth:
                yield _done(*begun.popleft())
        while begun:
            yield _done(*begun.popleft())
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)  # no wait: the iterator may be dropped in one of these threads


def _done(batch: T, jobs: Iterable[Future[None]]) -> T:
    for job in jobs:
        job.result()
    return batch


def shared_out(count: int, threads: int) -> list[slice]:
    """Divide a batch into at most one part a thread: to schedule small images one by one would take as long as them."""
    share = -(-count // threads)
    return [slice(begin, min(begin + share, count)) for begin in range(0, count, share)]


class BadImagePolicy:
    """The handling of bad images on one rank. Thread-safe."""

    def __init__(self, images: ImageSource, order: Order, data: ImageData) -> None:
        """Create the policy for the ``images`` that this rank reads in ``order``."""
        self._images = images
        self._order = order
        self._skips = data.on_bad_image == "skip"
        self._bad: set[int] = set()
        self._lock = Lock()

    def load_or_substitute(self, index: int, epoch: int, load: Callable[[int], T]) -> tuple[T, int] | None:
        """Load image ``index`` in an epoch, counted from 0, or a replacement if it is bad.

        An image is bad if ``load`` raises ImageDecodeError. Return what ``load`` does for an index, with the label it
        belongs to; None for a bad image in an evaluation.

        Raises:
            StorageAway: If the image cannot be read.
            UserError: If memory is short, a bad image is to "fail", or in training all 100 replacements are bad too.
        """
        for candidate in self._candidates(index, epoch):
            if candidate in self._bad:
                continue
            try:
                return patiently(self._images, candidate, load), int(self._images.labels[candidate])
            except OSError as error:
                name = self._images.name(candidate)
                raise StorageAway(f"{name} cannot be read ({error.strerror or error}); put that right") from None
            except ImageDecodeError as error:
                self._exclude(candidate, f"cannot be decoded ({error})")
        if isinstance(self._order, TrainSampler):
            raise UserError(
                f"{self._images.name(index)} cannot be decoded, nor can any of {_ATTEMPTS} other images; look at "
                "the data with `imagenet-fast data verify`"
            )
        return None

    def _exclude(self, index: int, fault: str) -> None:
        """Warn of a bad image once, or raise UserError if bad images must not be skipped."""
        sentence = f"{self._images.name(index)} {fault}"
        if not self._skips:
            raise UserError(
                f"{sentence}; put a sound copy in its place, or go on without it by --set data.on_bad_image=skip"
            ) from None
        instead = "another is shown instead" if isinstance(self._order, TrainSampler) else "it counts as wrong"
        with self._lock:  # held while warning too, so that the counts are printed in order
            if index not in self._bad:
                self._bad.add(index)
                warn(f"{sentence}: {instead}; bad images so far on this rank: {len(self._bad)}")

    def _candidates(self, index: int, epoch: int) -> Iterator[int]:
        yield index
        if isinstance(self._order, TrainSampler):
            for attempt in range(_ATTEMPTS):
                drawn = bits("substitute", self._order.seed, epoch, attempt, of=index)[0]
                yield int(drawn) % len(self._images)


class ThreadLoader:
    """Endless batches in ``order``.

    OpenCV and torch release the GIL while they work. So threads do what other loaders need processes for, and nothing
    is pickled, sent or stored twice.
    """

    def __init__(self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int) -> None:
        """Read ``images`` in this rank's ``order`` with so many decoding ``threads``, and yield them on ``device``."""
        cv2.setNumThreads(0)  # OpenCV would split each image among its own threads
        self._order = order
        self._images = images
        self._data = data
        self._augmentation = augmentation_of(data, order)
        self._policy = BadImagePolicy(images, order, data)
        self._device = device
        self._threads = threads

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end. Raises UserError if a bad image must not or cannot be replaced."""
        filled = prefetched(map(self._begin, self._order), self._threads, self._data.prefetch)
        return copied(filled, self._device, moved)

    def _begin(self, indices: BatchIndices) -> tuple[Batch, list[Job]]:
        """Allocate a batch and return it with the jobs that fill it."""
        count, pinned = len(indices.images), self._device.type == "cuda"
        size = resolution(self._data, self._order, indices).size
        pixels = empty((count, size, size, 3), torch.uint8, pinned)
        labels = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
        jobs = [
            self._fill(indices._replace(images=indices.images[part]), pixels.numpy()[part], labels.numpy()[part])
            for part in shared_out(count, self._threads)
        ]
        return Batch(pixels.permute(0, 3, 1, 2), labels, indices), jobs

    def _fill(self, indices: BatchIndices, pixels: Pixels, labels: NDArray[np.int64]) -> Job:
        """Fill ``pixels`` and ``labels`` with a part of a batch, one image per step."""
        self._images.readahead(indices.images)
        sizes = resolution(self._data, self._order, indices)
        for place, (index, drawn) in enumerate(zip(indices.images.tolist(), self.draws(indices), strict=False)):
            labels[place] = self.show(index, indices.epoch, sizes, drawn, pixels[place])
            yield

    def draws(self, indices: BatchIndices) -> Iterator[Drawn | None]:
        """Draw for the images of a batch, in one call; None for each if there is no augmentation."""
        if self._augmentation is None:
            return repeat(None)
        numbers, flips = self._augmentation.draw(indices)
        return zip(numbers, flips.tolist(), strict=True)

    def show(self, index: int, epoch: int, sizes: Resolution, drawn: Drawn | None, into: Pixels) -> int:
        """Write image ``index``, or what is shown for it if it is bad, to ``into`` and return the label."""
        shown = self._policy.load_or_substitute(index, epoch, partial(self._show, sizes, drawn, into))
        if shown is None:
            into[:] = 0
        return NO_CLASS if shown is None else shown[1]

    def _show(self, sizes: Resolution, drawn: Drawn | None, into: Pixels, index: int) -> None:
        image = decode(self._images.read(index))
        if self._augmentation is None or drawn is None:
            into[:] = central_crop(image, sizes)
            return
        numbers, flip = drawn
        crop = np.empty_like(into) if flip else into
        random_crop(image, sizes, self._augmentation, numbers.tolist(), into=crop)
        if flip:
            cv2.flip(crop, 1, dst=into)
