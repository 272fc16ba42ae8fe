"""Random images: no storage, no decoding, so that what remains is the training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from imagenet_fast.data.sampler import Order
from imagenet_fast.recipe.data_config import SyntheticData

_BANK = 256  # different images; image i is image i modulo this


class SyntheticLoader:
    """Batches in ``order``, without end, as the other loaders give them. Image i has label i mod classes."""

    def __init__(self, order: Order, data: SyntheticData, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (_BANK, data.image_size, data.image_size, 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self._images = pixels.to(device).permute(0, 3, 1, 2)
        self._order = order
        self._classes = data.classes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._images.device
        for _, indices in self._order:
            chosen = torch.from_numpy(indices).to(device, non_blocking=True)
            yield self._images[chosen % _BANK], chosen % self._classes
