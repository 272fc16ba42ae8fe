"""Cut, resize and mirror a batch of stored images at once, on the device.

Each row of a resized image is a weighted sum of rows of the stored one, and each column of columns. So two batched
products of matrices resize a whole batch, whatever its sizes, and crop, mirror or pad it on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from imagenet_fast.data.order import Augmentation, BatchIndices, Resolution

Sides = NDArray[np.int32]
"""Heights and widths of n images, or rows and columns in them, int32 [n, 2]."""


class Crops(NamedTuple):
    """Which parts of n images are resized and shown, each in S x S pixels."""

    begins: Sides
    """First row and column of the window that is resized."""
    lengths: Sides
    """Its height and width."""
    resized: Sides
    """Its height and width once it is resized."""
    shown: NDArray[np.int32]
    """The rows and columns of the resized window that are shown, in this order, [n, 2, S]."""

    def leave(self, which: NDArray[np.bool_]) -> None:
        """Show these images, [n], as they are; they have S x S pixels."""
        size = self.shown.shape[2]
        self.begins[which], self.lengths[which], self.resized[which] = 0, size, size
        self.shown[which] = np.arange(size)

    def places(self, first: Sides) -> NDArray[np.int32]:
        """Return ``places`` for ``resample``, of tiles that begin at these rows and columns of the images."""
        numbers = np.stack((first - self.begins, self.lengths, self.resized), 2)
        return np.concatenate((numbers, self.shown), 2).swapaxes(0, 1)

    def needed(self) -> tuple[Sides, Sides]:
        """Return the first row and column of each image that resizing reads, and the numbers of rows and columns."""
        scale = self.lengths / self.resized
        reach = np.maximum(scale, 1)
        first = (self.shown.min(2) + 0.5) * scale - reach
        end = (self.shown.max(2) + 0.5) * scale + reach
        first, end = np.floor(first).clip(0), np.minimum(np.ceil(end), self.lengths)
        return self.begins + first.astype(np.int32), (end - first).astype(np.int32)


def crops_of(sides: Sides, resolution: Resolution, augmentation: Augmentation | None, batch: BatchIndices) -> Crops:
    """Return the crops of the images in ``batch``, whose heights and widths are ``sides``, [n, 2].

    They are those of ``pixels.random_crop`` and ``central_crop``.
    """
    size, shorter = resolution
    first: Any = np.zeros_like(sides)
    if augmentation is not None:
        numbers, flips = augmentation.draw(batch)
    if augmentation is not None and augmentation.padding is None:
        windows = augmentation.windows(sides, numbers)
        begins, lengths, resized = windows[:, :2], windows[:, 2:], np.full_like(sides, size)
    else:
        begins, lengths = np.zeros_like(sides), sides.copy()
        resized = shorter * sides // sides.min(1, keepdims=True)
        first = np.rint((resized - size) / 2)
        if augmentation is not None:
            first = augmentation.corner(resized.astype(np.float64), size, numbers[:, :2])
    last = resized[..., None] - 1
    shown = first.astype(np.int32)[..., None] + np.arange(size, dtype=np.int32)
    shown = last - np.abs(last - np.abs(shown))  # padding is the mirror image
    if augmentation is not None:
        shown[flips, 1] = shown[flips, 1, ::-1]
    return Crops(begins, lengths, resized, shown)


def resample(tiles: Tensor, places: Tensor) -> Tensor:
    """Crop and resize ``tiles``; return images, uint8 [n, 3, S, S] in channels_last memory.

    Values are rounded once. On a GPU the products are in fp16, in which bytes are exact.

    Args:
        tiles: Parts of n images, uint8 [n, H, W, 3]; what lies beyond a part has any value.
        places: Of height and width: where the tile begins in the window; the window's length, also when resized; and
            the pixels that are shown. They are int32 [2, n, 3 + S].
    """
    dtype = torch.float16 if tiles.is_cuda else torch.float32
    (n, height, width, _), size = tiles.shape, places.shape[2] - 3
    rows, columns = (_weights(axis, length, dtype) for axis, length in zip(places, (height, width), strict=True))
    with torch.autocast(tiles.device.type, enabled=False):  # weights in bf16 would sum up to more than 1
        low = torch.bmm(rows, tiles.view(n, height, -1).to(dtype)).view(n, size, width, 3)
        shown = torch.bmm(columns, low.transpose(1, 2).reshape(n, width, -1)).round_().view(n, size, size, 3)
    return shown.transpose(1, 2).to(torch.uint8, memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def _weights(axis: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of each pixel of a tile in each one that is shown, [n, S, length]: PIL's bilinear filter."""
    first, whole, resized = axis[:, :3, None].unbind(1)
    scale = whole / resized
    pixels = first + torch.arange(length, dtype=torch.int32, device=axis.device)
    centres = (axis[:, 3:] + 0.5) * scale - 0.5
    weights = 1 - (pixels[:, None] - centres[:, :, None]).abs() / scale.clamp(min=1)[:, :, None]
    weights = weights.clamp_(min=0) * ((pixels >= 0) & (pixels < whole))[:, None]
    return (weights / weights.sum(2, keepdim=True)).to(dtype)
