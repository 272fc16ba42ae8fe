"""Images decoded by OpenCV, cropped, resized by torch and mirrored, in threads; no GPU, no other process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from imagenet_fast.data.augmentation import augmentation_of
from imagenet_fast.data.bad_image_policy import NO_CLASS, BadImagePolicy
from imagenet_fast.data.decode import Pixels
from imagenet_fast.data.decoded_cache import pixels_of
from imagenet_fast.data.huge_pages import fresh
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.data.resize import middle_of, resized, scaled_size
from imagenet_fast.data.resolution import Resolution, resolution
from imagenet_fast.data.sampler import BatchIndices, Order
from imagenet_fast.recipe.data_config import ImageData


class FolderLoader:
    """Batches in ``order``, without end: images uint8 [n, 3, S, S] in channels_last memory, labels int64 [n].

    Both let go of Python's lock while they work, so that threads do what others need processes for: nothing is
    pickled, sent or kept twice.
    """

    def __init__(self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int) -> None:
        cv2.setNumThreads(0)  # it would divide each image among threads of its own
        self._order = order
        self._images = images
        self._data = data
        self._ahead = data.prefetch
        self._chance = augmentation_of(data, order)
        self._pixels_of = pixels_of(images, order, data)
        self._substitution = BadImagePolicy(images, order, data)
        self._device = device
        self._threads = threads

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in prefetched(map(self._begin, self._order), self._threads, self._ahead):
            images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
            yield images, labels.to(self._device, non_blocking=True)

    def _begin(self, batch: BatchIndices) -> tuple[tuple[Tensor, Tensor], list[Job]]:
        """Memory for a batch, uint8 [n, S, S, 3] and int64 [n], and what fills it: a piece a thread, since handing
        small images over one by one would take as long as they do."""
        self._images.expect(batch.images)
        count, pinned = len(batch.images), self._device.type == "cuda"
        size, _ = resolution(self._data, self._order, batch.epoch)
        shape = (count, size, size, 3)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pinned else fresh(shape, torch.uint8)
        labels = torch.empty(count, dtype=torch.int64, pin_memory=pinned)
        share = -(-count // self._threads)
        parts = [slice(begin, begin + share) for begin in range(0, count, share)]
        pieces = [
            self._fill(BatchIndices(batch.epoch, batch.images[part]), pixels.numpy()[part], labels.numpy()[part])
            for part in parts
        ]
        return (pixels, labels), pieces

    def _fill(self, batch: BatchIndices, places: Pixels, labels: NDArray[np.int64]) -> Job:
        """With the images of a part of a batch, one a step."""
        chances = repeat(None) if self._chance is None else zip(*self._chance.draw(batch), strict=True)
        shown_at = resolution(self._data, self._order, batch.epoch)
        unflipped = np.empty(places.shape[1:], dtype=np.uint8)
        for number, (index, chance) in enumerate(zip(batch.images.tolist(), chances, strict=False)):
            shown = self._substitution.usable(index, batch.epoch, self._pixels_of)
            labels[number] = NO_CLASS if shown is None else shown.label
            if shown is None:
                places[number] = 0
            elif self._chance is None or chance is None:
                places[number] = central_crop(shown.made, shown_at)
            else:
                numbers, flip = chance
                window = self._chance.window(shown.made.shape[0], shown.made.shape[1], numbers.tolist())
                seen = shown.made[window.rows, window.columns]
                resized(seen, shown_at.size, shown_at.size, into=unflipped if flip else places[number])
                if flip:
                    cv2.flip(unflipped, 1, dst=places[number])
            yield


def central_crop(image: Pixels, shown_at: Resolution) -> Pixels:
    """[size, size, 3] from the middle, once the shorter side has been made ``shorter``."""
    size, shorter = shown_at
    image = resized(image, *scaled_size(image.shape[0], image.shape[1], shorter))
    top, left = middle_of(image.shape[:2], size)
    return image[top : top + size, left : left + size]
