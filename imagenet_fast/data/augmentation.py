"""What is done to an image by chance: a function of (seed, epoch, image), whatever the loader and the rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.rng import uniforms
from imagenet_fast.data.sampler import BatchIndices, Order, TrainSampler
from imagenet_fast.recipe.data_config import ImageData

_ATTEMPTS = 10
_WINDOW_NUMBERS = 2 + 2 * _ATTEMPTS
"""That choose a window: its place, then the area and the aspect ratio of each attempt."""

_ASPECTS = (3 / 4, 4 / 3)


class Window(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        return slice(self.left, self.left + self.width)


@dataclass(frozen=True)
class Augmentation:
    """A crop to a random window, and a horizontal flip in half of all."""

    seed: int
    area: tuple[float, float]
    """The smallest and the largest share of an image that a window covers."""
    flip: bool
    side: float | None = None
    """Windows are squares of this share of the image's shorter side instead."""

    def draw(self, batch: BatchIndices) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The numbers [n, 22] by which :meth:`window` chooses, and which images are mirrored, [n]."""
        numbers = uniforms(_WINDOW_NUMBERS + 1, "augmentation", self.seed, batch.epoch, of=batch.images)
        return numbers[:, :-1], self.flip & (numbers[:, -1] < 0.5)

    def window(self, height: int, width: int, numbers: Sequence[float]) -> Window:
        """Of an image of that size, by torchvision's rule (``RandomResizedCrop``), unless windows have a fixed side.

        An area, and an aspect ratio from 3:4 to 4:3 of uniform logarithm, are tried up to ten times until they fit; a
        window that does, lies anywhere. Where none fits, as in a long strip, it is the largest central one of such a
        ratio. Those of a fixed side lie anywhere in the central square, as AlexNet's own (Krizhevsky et al., 2012).
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


def augmentation_of(data: ImageData, order: Order) -> Augmentation | None:
    """Of the images in ``order``, if they are for training and the recipe wants one."""
    if data.augment and isinstance(order, TrainSampler):
        side = data.image_size / data.resize if data.crop == "window" else None
        return Augmentation(order.seed, data.crop_area, data.flip, side)
    return None
