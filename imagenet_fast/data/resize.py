"""Resize images, and compute their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from imagenet_fast.data.decode import Pixels

_LONGEST = 8  # sides of what is seen of a strip, the longer one by the shorter one


def shrunk(image: Pixels, shorter: int) -> Pixels:
    """Return the image with a shorter side of at most ``shorter`` pixels; unchanged if that is 0."""
    return resized(image, *shrunk_size(image.shape[0], image.shape[1], shorter))


def shrunk_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return the (height, width) that ``shrunk`` gives an image of this size."""
    shortest = min(height, width)
    return scaled_size(height, width, shorter) if 0 < shorter < shortest else (height, width)


def scaled_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side scaled to ``shorter``, rounded as in torchvision."""
    shortest = min(height, width)
    return shorter * height // shortest, shorter * width // shortest


def without_ends(image: Pixels) -> Pixels:
    """Return a view of an image that is at most 8 times as long as wide: its middle, and an odd pixel more.

    A strip has too many pixels once its shorter side is enlarged, and few of them are in a crop.
    """
    height, width = image.shape[:2]
    most = _LONGEST * min(height, width)
    top, left = max(0, height - most) // 2, max(0, width - most) // 2
    return image[top : height - top, left : width - left]


def is_strip(height: int, width: int) -> bool:
    """Return whether ``without_ends`` takes something away from an image of this size."""
    return max(height, width) - _LONGEST * min(height, width) > 1


def middle_of(sides: Sequence[int], size: int) -> tuple[int, ...]:
    """Return where the central ``size`` pixels of each side begin, rounded as in torchvision."""
    return tuple(round((side - size) / 2) for side in sides)


def resized(image: Pixels, height: int, width: int, into: Pixels | None = None) -> Pixels:
    """Resize with PIL's bilinear filter, which widens when it shrinks; within one grey level of PIL's result.

    It uses torch's filter for bytes: that takes a fifth of PIL's time, and a third of OpenCV's mean over areas. If no
    side shrinks, OpenCV has the same filter; for a small image it takes less time than just calling torch.

    Args:
        image: The image.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
        into: Memory for the result, uint8 [height, width, 3]; None: allocate it.

    Returns:
        ``into``, new memory, or without ``into`` the image itself if it has this size already.
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
    own = image if image.flags.writeable else image.copy()  # torch warns about a read-only array, as in a mapped file
    # `interpolate` calls this op but returns channels first; converting that back takes longer than the filter.
    torch.ops.aten._upsample_bilinear2d_aa.out(_channels_first(own), [height, width], False, out=_channels_first(into))
    return into


def _channels_first(image: Pixels) -> Tensor:
    """Return a view of the same memory as [1, 3, height, width]."""
    return torch.from_numpy(image).permute(2, 0, 1)[None]
