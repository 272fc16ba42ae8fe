"""Compute the size of images: it may be smaller in earlier epochs, and different in an evaluation."""

from __future__ import annotations

from typing import NamedTuple

from imagenet_fast.data.sampler import Order, TrainSampler
from imagenet_fast.recipe.data_config import ImageData


class Resolution(NamedTuple):
    """The size of the images of an epoch, in pixels."""

    size: int
    """Side of the square image that the network receives."""
    shorter: int
    """Shorter side of the whole image before a central crop."""


def resolution(data: ImageData, order: Order, epoch: int) -> Resolution:
    """Return the resolution of the images in ``order`` in ``epoch``, counted from 0.

    Progressive resizing follows Howard ("Training Imagenet in 3 hours for USD 25; and CIFAR10 for USD 0.26", fast.ai,
    2018).
    """
    if not isinstance(order, TrainSampler):
        return Resolution(data.evaluated_size, data.resize)
    size = next((size for begin, size in reversed(data.sizes) if begin <= epoch + 1), data.image_size)
    return Resolution(size, data.resize * size // data.image_size)
