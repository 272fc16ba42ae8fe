"""Decide which image a rank shows when, how large, cut out where, and whether mirrored.

All of it follows from numbers that are drawn by name: a number is a function of its purpose, not of what was drawn
before. So it is the same on any number of ranks, and a resumed run has no generator state to restore.

Each name picks a number of a SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose numbers can be computed in any order. That number is the state of the generator that
the next name picks from.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData

Indices = NDArray[np.int64]
Bits = NDArray[np.uint64]
Numbers = TypeVar("Numbers", float, NDArray[np.float64])
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def bits(purpose: str, *names: int, of: Indices | int) -> Bits:
    """Return 64 random bits for each integer in ``of``, uint64 [n]; all integers are at least 0.

    Args:
        purpose: What the bits are for, such as "augmentation".
        *names: Such as a seed and an epoch.
        of: Such as indices of images, [n] or a single one.
    """
    return _pick(_generator(purpose, *names), np.atleast_1d(np.asarray(of, dtype=np.uint64)))


def uniforms(count: int, purpose: str, *names: int, of: Indices | int) -> NDArray[np.float64]:
    """Return ``count`` random numbers from [0, 1) for each integer in ``of``, float64 [n, count]; see ``bits``."""
    picked = _pick(bits(purpose, *names, of=of)[:, None], np.arange(count, dtype=np.uint64))
    return (picked >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=16)  # many small batches ask for the same one
def _generator(purpose: str, *names: int) -> Bits:
    """Return the generator state, uint64 [1], that the names pick."""
    state = np.zeros(1, dtype=np.uint64)
    for name in (zlib.crc32(purpose.encode()), *names):
        state = _pick(state, np.array([name], dtype=np.uint64))
    return state


def _pick(state: Bits, index: Bits) -> Bits:
    """Return the number at ``index`` of a generator; only for arrays, since NumPy scalars warn when they wrap."""
    z: Bits = state + (index + np.uint64(1)) * _GOLDEN_GAMMA
    for shift, factor in _MIXERS:
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> np.uint64(31))


class BatchIndices(NamedTuple):
    """A rank's batch: indices ``images`` [n], and the epoch, counted from 0 (always 0 in an evaluation)."""

    epoch: int
    images: Indices
    done: float = 0.0
    """Share of the epoch's steps that were taken before this batch's, from 0 to below 1."""


@dataclass(frozen=True)
class TrainSampler:
    """This rank's micro-batches of a training set, epoch after epoch without end, from ``first_step`` on.

    Every epoch is a new permutation of all images, the same on every rank. A step takes its next global batch, cut
    into micro-batches. The number of ranks decides only which rank computes which micro-batch. So a run on another
    number of ranks sees the same micro-batches (and the same batch-norm statistics). Images that do not fill a global
    batch are left out of that epoch. The ranks of a pipeline, a stride of ``batching.readers`` apart, read the same
    images.

    The order is a function of the seed and the epoch. So a sampler that begins at the step where another run stopped
    continues as that run would have, also on another number of ranks.
    """

    images: int
    batching: Batching
    rank: int
    seed: int
    first_step: int = 0
    """Number of steps already taken, over all epochs."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole global batches in an epoch."""
        return self.images // self.batching.global_batch

    def __iter__(self) -> Iterator[BatchIndices]:
        """Yield this rank's micro-batches without end."""
        epoch, begin = divmod(self.first_step, self.steps_per_epoch)
        split = (self.batching.readers, self.batching.accumulation, self.batching.micro_batch)
        ahead = ThreadPoolExecutor(1, "order of images")  # sorting a million numbers takes longer than a step
        following = ahead.submit(self._order, epoch)
        try:
            while True:
                order, following = following.result(), ahead.submit(self._order, epoch + 1)
                for step in range(begin, self.steps_per_epoch):
                    start = step * self.batching.global_batch
                    batch = order[start : start + self.batching.global_batch]
                    for images in batch.reshape(split)[self.rank % self.batching.readers]:
                        yield BatchIndices(epoch, images, step / self.steps_per_epoch)
                epoch, begin = epoch + 1, 0
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)  # no wait: it may be dropped in that thread

    def _order(self, epoch: int) -> Indices:
        return np.argsort(bits("order", self.seed, epoch, of=np.arange(self.images)), kind="stable")


@dataclass(frozen=True)
class EvalSampler:
    """This rank's batches of a validation set: a contiguous shard, each image once; the last batch may be smaller.

    Shards differ by at most one image, and a rank may have none. Iteration starts over without end; ``batches`` is the
    length of one evaluation.
    """

    images: int
    batch: int
    ranks: int
    rank: int

    @property
    def shard(self) -> range:
        """Indices of this rank's images."""
        return range(self.images * self.rank // self.ranks, self.images * (self.rank + 1) // self.ranks)

    @property
    def batches(self) -> int:
        """Number of this rank's batches in one evaluation."""
        return -(-len(self.shard) // self.batch)

    def __iter__(self) -> Iterator[BatchIndices]:
        """Yield the batches of one evaluation after another, without end; none if the shard is empty."""
        shard = np.asarray(self.shard)
        while self.batches:
            for start in range(0, len(shard), self.batch):
                yield BatchIndices(0, shard[start : start + self.batch])


Order = TrainSampler | EvalSampler


class Resolution(NamedTuple):
    """The size of the images of a step, in pixels."""

    size: int
    """Side of the square image that the network receives."""
    shorter: int
    """Shorter side of the whole image before a central crop."""


def resolution(data: ImageData, order: Order, batch: BatchIndices) -> Resolution:
    """Return the resolution of the images of ``batch`` in ``order``.

    Progressive resizing follows Howard ("Training Imagenet in 3 hours for USD 25; and CIFAR10 for USD 0.26", fast.ai,
    2018). With ``size_multiple`` it follows Composer's ProgressiveResizing, which rounds a linear ramp.
    """
    if not isinstance(order, TrainSampler):
        return Resolution(data.evaluated_size, data.resize)
    now = 1 + batch.epoch + batch.done
    passed = [knot for knot in data.sizes if knot[0] <= now]
    size = passed[-1][1] if passed else data.image_size
    if passed and data.size_multiple and len(passed) < len(data.sizes):
        (begin, smaller), (end, larger) = passed[-1], data.sizes[len(passed)]
        exact = smaller + (larger - smaller) * (now - begin) / (end - begin)
        size = round(exact / data.size_multiple) * data.size_multiple
    return Resolution(size, data.resize * size // data.image_size)


_ATTEMPTS = 10
_WINDOW_NUMBERS = 2 + 2 * _ATTEMPTS
"""Random numbers per window: two for its position, then an area and an aspect ratio for each attempt."""

_ASPECTS = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Augmentation:
    """A crop to a random window, and a horizontal flip of half of the images unless ``flip`` is False."""

    seed: int
    area: tuple[float, float]
    """Smallest and largest share of the image's area that a window covers."""
    flip: bool | Literal["alternate"]
    """"alternate": flip those images that were not flipped in the epoch before."""
    side: float | None = None
    """Side of square windows, as a share of the image's shorter side; None: windows are drawn by ``area``."""
    padding: int | None = None
    """Pixels of padding on each side of a resized image, of which a square is cropped; None: ``windows`` apply."""

    def draw(self, batch: BatchIndices) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Draw the random numbers for a batch.

        Returns:
            The numbers that ``windows`` takes, float64 [n, 22], and whether each image is flipped, bool [n].
        """
        numbers = uniforms(_WINDOW_NUMBERS + 1, "augmentation", self.seed, batch.epoch, of=batch.images)
        flips = numbers[:, -1] < 0.5
        if self.flip == "alternate":
            first = uniforms(1, "flip", self.seed, of=batch.images)[:, 0] < 0.5
            flips = first ^ (batch.epoch % 2 == 1)
        return numbers[:, :-1], flips & bool(self.flip)

    def window(self, height: int, width: int, numbers: Sequence[float]) -> tuple[int, int, int, int]:
        """Choose the crop window of one image, in pixels: top, left, height and width.

        If ``side`` is None, follow torchvision's ``RandomResizedCrop``. It tries an area and an aspect ratio from 3:4
        to 4:3 (uniform in its logarithm) up to ten times, until the window fits. A window that fits is placed anywhere
        in the image. If none fits, as in a long strip, take the largest central window with a ratio in that range.

        If ``side`` is set, the square window lies anywhere in the central square, as in AlexNet (Krizhevsky et al.,
        2012). The ``numbers`` are a row [22] of those that ``draw`` returns.
        """
        if self.side is not None:
            shorter = min(height, width)
            side = max(1, round(self.side * shorter))
            down, right = (int(number * (shorter - side + 1)) for number in numbers[:2])
            return (height - shorter) // 2 + down, (width - shorter) // 2 + right, side, side
        (smallest, largest), (narrowest, widest) = self.area, _ASPECTS
        for attempt in range(2, _WINDOW_NUMBERS, 2):
            pixels = height * width * (smallest + (largest - smallest) * numbers[attempt])
            aspect = narrowest * (widest / narrowest) ** numbers[attempt + 1]
            tall, wide = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
            if 0 < tall <= height and 0 < wide <= width:
                return int(numbers[0] * (height - tall + 1)), int(numbers[1] * (width - wide + 1)), tall, wide
        tall, wide = min(height, round(width / narrowest)), min(width, round(height * widest))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def windows(self, sides: NDArray[np.integer], numbers: NDArray[np.float64]) -> NDArray[np.int32]:
        """Choose the windows of n images, [n, 4], by their heights and widths, [n, 2], and numbers, [n, 22]."""
        drawn = zip(*sides.T.tolist(), numbers.tolist(), strict=True)
        return np.array([self.window(*image) for image in drawn], np.int32).reshape(-1, 4)

    def corner(self, side: Numbers, size: int, number: Numbers) -> Numbers:
        """Choose where a square of ``size`` pixels begins along a side of a padded image, as in ``RandomCrop``.

        A place in the padding before the image is below 0. Sides are without padding, one or an array of them.
        """
        assert self.padding is not None
        return number * (side + (2 * self.padding - size + 1)) // 1 - self.padding


def augmentation_of(data: ImageData, order: Order) -> Augmentation | None:
    """Return the augmentation for ``order``, or None for an evaluation or if the recipe turns it off."""
    if data.augment and isinstance(order, TrainSampler):
        side = data.image_size / data.resize if data.crop == "window" else None
        padding = data.crop_padding if data.crop == "padded" else None
        return Augmentation(order.seed, data.crop_area, data.flip, side, padding)
    return None
