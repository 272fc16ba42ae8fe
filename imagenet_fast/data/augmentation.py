"""What is done to a picture by chance: a function of (seed, epoch, picture), whatever the loader and the rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.chance import uniforms
from imagenet_fast.data.order import MicroBatch, Order, TrainOrder
from imagenet_fast.recipe import schema

ATTEMPTS = 10
NUMBERS = 2 + 2 * ATTEMPTS
"""Random numbers that choose a window: its place, then the area and the shape of each attempt."""

_ASPECTS = (3 / 4, 4 / 3)
_LOG_ASPECTS = (math.log(_ASPECTS[0]), math.log(_ASPECTS[1]))


class Window(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Augmentation:
    """Random-resized crop to windows of ``area`` (smallest and largest share), and a horizontal flip in half of all."""

    seed: int
    area: tuple[float, float]
    flip: bool

    def windows(self, batch: MicroBatch) -> NDArray[np.float64]:
        """What :meth:`window` needs to know of each picture, [n, NUMBERS] from [0, 1)."""
        return uniforms(NUMBERS, "window", self.seed, batch.epoch, batch.pictures)

    def flips(self, batch: MicroBatch) -> NDArray[np.bool_]:
        """Which pictures are mirrored, [n]."""
        return self.flip & (uniforms(1, "flip", self.seed, batch.epoch, batch.pictures)[:, 0] < 0.5)

    def window(self, height: int, width: int, numbers: Sequence[float]) -> Window:
        """Of a picture of that size, by torchvision's rule (``RandomResizedCrop``).

        An area, and an aspect ratio from 3:4 to 4:3 of uniform logarithm, are tried up to ten times until they fit; a
        window that does, lies anywhere. Where none fits, as in a long strip, it is the largest central one of such a
        ratio.
        """
        vertical, horizontal, *attempts = numbers
        for area, aspect in zip(attempts[::2], attempts[1::2], strict=True):
            pixels = height * width * _between(self.area, area)
            ratio = math.exp(_between(_LOG_ASPECTS, aspect))
            tall, wide = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
            if 0 < tall <= height and 0 < wide <= width:
                return Window(int(vertical * (height - tall + 1)), int(horizontal * (width - wide + 1)), tall, wide)
        tall, wide = min(height, round(width / _ASPECTS[0])), min(width, round(height * _ASPECTS[1]))
        return Window((height - tall) // 2, (width - wide) // 2, tall, wide)


def augmentation_of(data: schema.ImageData, order: Order) -> Augmentation | None:
    """Of the pictures in ``order``, if they are for training and the recipe wants one."""
    if data.augment and isinstance(order, TrainOrder):
        return Augmentation(order.seed, data.crop_area, data.flip)
    return None


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share
