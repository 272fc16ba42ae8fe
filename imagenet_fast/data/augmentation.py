"""Random crops and flips: a function of (seed, epoch, image), the same for every loader and rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.rng import uniforms
from imagenet_fast.data.sampler import BatchIndices, Order, TrainSampler
from imagenet_fast.recipe.data_config import ImageData

_ATTEMPTS = 10
_WINDOW_NUMBERS = 2 + 2 * _ATTEMPTS
"""Random numbers per window: two for its position, then an area and an aspect ratio for each attempt."""

_ASPECTS = (3 / 4, 4 / 3)


class Window(NamedTuple):
    """A rectangular part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def rows(self) -> slice:
        """Slice of the image's rows that the window covers."""
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        """Slice of the image's columns that the window covers."""
        return slice(self.left, self.left + self.width)


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
    """Pixels of padding on each side of a resized image, of which a square is cropped; None: ``window`` applies."""

    def draw(self, batch: BatchIndices) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Draw the random numbers for a batch.

        Returns:
            The numbers that ``window`` takes, float64 [n, 22], and whether each image is flipped, bool [n].
        """
        numbers = uniforms(_WINDOW_NUMBERS + 1, "augmentation", self.seed, batch.epoch, of=batch.images)
        flips = numbers[:, -1] < 0.5
        if self.flip == "alternate":
            first = uniforms(1, "flip", self.seed, of=batch.images)[:, 0] < 0.5
            flips = first ^ (batch.epoch % 2 == 1)
        return numbers[:, :-1], flips & bool(self.flip)

    def window(self, height: int, width: int, numbers: Sequence[float]) -> Window:
        """Choose the crop window of one image.

        If ``side`` is None, follow torchvision's ``RandomResizedCrop``. It tries an area and an aspect ratio from 3:4
        to 4:3 (uniform in its logarithm) up to ten times, until the window fits. A window that fits is placed anywhere
        in the image. If none fits, as in a long strip, take the largest central window with a ratio in that range.

        If ``side`` is set, the square window lies anywhere in the central square, as in AlexNet (Krizhevsky et al.,
        2012).

        Args:
            height: Height of the image in pixels.
            width: Width of the image in pixels.
            numbers: One row [22] of the numbers that ``draw`` returns.
        """
        if self.side is not None:
            shorter = min(height, width)
            side = max(1, round(self.side * shorter))
            down, right = (int(number * (shorter - side + 1)) for number in numbers[:2])
            return Window((height - shorter) // 2 + down, (width - shorter) // 2 + right, side, side)
        (smallest, largest), (narrowest, widest) = self.area, _ASPECTS
        for attempt in range(2, _WINDOW_NUMBERS, 2):
            pixels = height * width * (smallest + (largest - smallest) * numbers[attempt])
            aspect = narrowest * (widest / narrowest) ** numbers[attempt + 1]
            tall, wide = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
            if 0 < tall <= height and 0 < wide <= width:
                return Window(int(numbers[0] * (height - tall + 1)), int(numbers[1] * (width - wide + 1)), tall, wide)
        tall, wide = min(height, round(width / narrowest)), min(width, round(height * widest))
        return Window((height - tall) // 2, (width - wide) // 2, tall, wide)

    def padded_window(self, height: int, width: int, size: int, numbers: Sequence[float]) -> Window:
        """Choose the square that is cropped from one resized and padded image, as torchvision's ``RandomCrop`` does.

        Args:
            height: Height of the image in pixels, without padding.
            width: Width of the image in pixels, without padding.
            size: Side of the square in pixels.
            numbers: One row [22] of the numbers that ``draw`` returns.

        Returns:
            The square's place in the padded image.
        """
        assert self.padding is not None
        top, left = (
            int(number * (side + 2 * self.padding - size + 1))
            for number, side in zip(numbers, (height, width), strict=False)
        )
        return Window(top, left, size, size)


def augmentation_of(data: ImageData, order: Order) -> Augmentation | None:
    """Return the augmentation for ``order``, or None for an evaluation or if the recipe turns it off."""
    if data.augment and isinstance(order, TrainSampler):
        side = data.image_size / data.resize if data.crop == "window" else None
        padding = data.crop_padding if data.crop == "padded" else None
        return Augmentation(order.seed, data.crop_area, data.flip, side, padding)
    return None
