"""How large images are shown: smaller in earlier epochs perhaps, otherwise in an evaluation perhaps."""

from __future__ import annotations

from typing import NamedTuple

from imagenet_fast.data.sampler import Order, TrainSampler
from imagenet_fast.recipe.data_config import ImageData


class Resolution(NamedTuple):
    """In pixels."""

    size: int
    """Of each side of what is shown."""
    shorter: int
    """Of the whole image's shorter side, where its middle is shown."""


def resolution(data: ImageData, order: Order, epoch: int) -> Resolution:
    """Of the images in ``order`` in ``epoch``, counted from 0. Progressive resizing is Howard's ("Training Imagenet
    in 3 hours for USD 25; and CIFAR10 for USD 0.26", fast.ai, 2018)."""
    if not isinstance(order, TrainSampler):
        return Resolution(data.evaluated_size, data.resize)
    size = next((size for begin, size in reversed(data.sizes) if begin <= epoch + 1), data.image_size)
    return Resolution(size, data.resize * size // data.image_size)
