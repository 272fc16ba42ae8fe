"""Images in another size."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from imagenet_fast.data.decode import Pixels


def shrunk(image: Pixels, shorter: int) -> Pixels:
    """With a shorter side of at most ``shorter``; as it is where that is 0."""
    return resized(image, *shrunk_size(image.shape[0], image.shape[1], shorter))


def shrunk_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Of an image of that size."""
    shortest = min(height, width)
    return scaled_size(height, width, shorter) if 0 < shorter < shortest else (height, width)


def scaled_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Of an image of that size once its shorter side is ``shorter``, by torchvision's rounding."""
    shortest = min(height, width)
    return shorter * height // shortest, shorter * width // shortest


def middle_of(sides: Sequence[int], size: int) -> tuple[int, ...]:
    """Where ``size`` pixels in the middle of each side begin, by torchvision's rounding."""
    return tuple(round((side - size) / 2) for side in sides)


def resized(image: Pixels, height: int, width: int, into: Pixels | None = None) -> Pixels:
    """By PIL's bilinear filter, which widens where it shrinks: within a grey level of PIL's result. It lies in
    ``into``, memory of that size, or in new memory, or is the image itself.

    It is torch's for bytes, in a fifth of PIL's time and in a third of that of OpenCV's mean over areas. Where nothing
    shrinks OpenCV has the same filter, and takes less for a small image than torch does to be called.
    """
    if image.shape[:2] == (height, width):
        if into is None:
            return image
        into[:] = image
        return into
    if into is None:
        into = np.empty((height, width, 3), dtype=np.uint8)
    if image.shape[0] <= height and image.shape[1] <= width:
        cv2.resize(image, (width, height), dst=into, interpolation=cv2.INTER_LINEAR)
        return into
    own = image if image.flags.writeable else image.copy()  # torch warns of a mapped file
    # What `interpolate` calls; that would put the channels first, and to turn them again takes longer than the filter.
    torch.ops.aten._upsample_bilinear2d_aa.out(_channels_first(own), [height, width], False, out=_channels_first(into))
    return into


def _channels_first(image: Pixels) -> Tensor:
    """The same memory as [1, 3, height, width]."""
    return torch.from_numpy(image).permute(2, 0, 1)[None]
