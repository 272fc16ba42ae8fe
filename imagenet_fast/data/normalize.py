"""Normalise images on the device: they are copied there as bytes, a quarter of the size of fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from imagenet_fast.recipe.data_config import Data

_GRAIN = 32_768
"""Number of values that a CPU normalises at a time.

They stay in its cache from one operation to the next. For no more than these, torch uses a single thread. That is
faster here than two: other threads decode meanwhile, and the two would wait for each other.
"""


class Normalizer:
    """Batches of a loader, normalised for a network: (x / 255 - mean) / std per channel, in ``dtype``.

    Values are computed in fp32 and rounded once.
    """

    def __init__(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        data: Data,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool = True,
    ) -> None:
        """Compute the scale and shift of each channel.

        Args:
            batches: Images uint8 [n, 3, S, S] in channels_last memory, and labels, on ``device``.
            data: The recipe's ``[data]`` table, for mean, std and the largest image size.
            device: Device of the batches.
            dtype: Data type of the normalised images.
            channels_last: Whether their memory stays channels_last; else it is contiguous, which costs a copy.
        """
        mean, std = torch.tensor([data.mean, data.std], dtype=torch.float64)
        widest = max(data.image_size, data.evaluated_size, *(size for _, size in data.sizes), 1)
        # Repeated for a whole row of pixels: three channels alone are too few for vector instructions.
        self._scale = (1 / (255 * std)).float().repeat(widest).to(device)
        self._shift = (-mean / std).float().repeat(widest).to(device)
        self._batches = batches
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images [n, 3, S, S], and labels."""
        for images, labels in self._batches:
            yield self._normalise(images).contiguous(memory_format=self._format), labels

    def _normalise(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 2, 3, 1)
        scale, shift = (values[: 3 * pixels.shape[2]] for values in (self._scale, self._shift))
        rows = pixels.reshape(-1, len(scale))
        if rows.is_cuda:  # one kernel casts, computes and rounds
            normalised = torch.empty(rows.shape, dtype=self._dtype, device=rows.device)
            torch.addcmul(shift, rows, scale, out=normalised)
        else:
            normalised = fresh(rows.shape, self._dtype)
            few = max(1, _GRAIN // len(scale))
            for some, place in zip(rows.split(few), normalised.split(few), strict=True):
                torch.addcmul(shift, some.float(), scale, out=place)
        return normalised.view(pixels.shape).permute(0, 3, 1, 2)


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in memory from NumPy, which asks for huge pages.

    The first touch of a large tensor takes a third of the time that small pages take. For one image, small
    pages would take half of a crop's time.
    """
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
