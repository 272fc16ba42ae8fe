"""Make random images without storage or decoding, so that only the training step is left to measure."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from imagenet_fast.data.sampler import Order
from imagenet_fast.recipe.data_config import SyntheticData

_BANK = 256  # number of different images; image i is image i modulo this


class SyntheticLoader:
    """Endless batches in ``order``, in the form of the other loaders. Image i has label i mod classes."""

    def __init__(self, order: Order, data: SyntheticData, device: torch.device, seed: int) -> None:
        """Create the random images from ``seed``, and copy them to ``device``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (_BANK, data.image_size, data.image_size, 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self._images = pixels.to(device).permute(0, 3, 1, 2)
        self._order = order
        self._classes = data.classes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images uint8 [n, 3, S, S] in channels_last memory, and labels int64 [n]."""
        device = self._images.device
        for _, indices in self._order:
            chosen = torch.from_numpy(indices).to(device, non_blocking=True)
            yield self._images[chosen % _BANK], chosen % self._classes
