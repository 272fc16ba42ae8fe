"""Decode images with OpenCV, crop, resize (torch) and flip them in threads; no GPU and no other process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from imagenet_fast.data.augmentation import Augmentation, augmentation_of
from imagenet_fast.data.bad_images import NO_CLASS, BadImagePolicy
from imagenet_fast.data.decode import Pixels, decode
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.normalize import fresh
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.data.resize import middle_of, resized, scaled_size, without_ends
from imagenet_fast.data.sampler import BatchIndices, Order, Resolution, resolution
from imagenet_fast.recipe.data_config import ImageData


class FolderLoader:
    """Endless batches in ``order``: images uint8 [n, 3, S, S] in channels_last memory, labels int64 [n].

    OpenCV and torch release the GIL while they work. So threads do what other loaders need processes for, and nothing
    is pickled, sent or stored twice.
    """

    def __init__(self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int) -> None:
        """Keep the settings.

        Args:
            images: The images to read.
            order: This rank's batches of indices.
            data: The recipe's ``[data]`` table.
            device: Device of the batches.
            threads: Number of decoding threads.
        """
        cv2.setNumThreads(0)  # OpenCV would split each image among its own threads
        self._order = order
        self._images = images
        self._data = data
        self._ahead = data.prefetch
        self._chance = augmentation_of(data, order)
        self._substitution = BadImagePolicy(images, order, data)
        self._device = device
        self._threads = threads

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) without end.

        Raises:
            UserError: If a bad image must not or cannot be replaced.
        """
        for pixels, labels in prefetched(map(self._begin, self._order), self._threads, self._ahead):
            images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
            yield images, labels.to(self._device, non_blocking=True)

    def _begin(self, batch: BatchIndices) -> tuple[tuple[Tensor, Tensor], list[Job]]:
        """Allocate a batch, uint8 [n, S, S, 3] and int64 [n], and return it with the jobs that fill it.

        There is at most one job per thread: to schedule small images one by one would take as long as to decode them.
        """
        self._images.readahead(batch.images)
        count, pinned = len(batch.images), self._device.type == "cuda"
        size, _ = resolution(self._data, self._order, batch)
        shape = (count, size, size, 3)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pinned else fresh(shape, torch.uint8)
        labels = torch.empty(count, dtype=torch.int64, pin_memory=pinned)
        share = -(-count // self._threads)
        parts = [slice(begin, begin + share) for begin in range(0, count, share)]
        pieces = [
            self._fill(batch._replace(images=batch.images[part]), pixels.numpy()[part], labels.numpy()[part])
            for part in parts
        ]
        return (pixels, labels), pieces

    def _fill(self, batch: BatchIndices, places: Pixels, labels: NDArray[np.int64]) -> Job:
        """Fill ``places`` and ``labels`` with a part of a batch, one image per step."""
        chances = repeat(None) if self._chance is None else zip(*self._chance.draw(batch), strict=True)
        shown_at = resolution(self._data, self._order, batch)
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
                random_crop(
                    shown.made, shown_at, self._chance, numbers.tolist(), into=unflipped if flip else places[number]
                )
                if flip:
                    cv2.flip(unflipped, 1, dst=places[number])
            yield

    def _pixels_of(self, index: int) -> Pixels:
        stored = self._images.pixels(index)
        return decode(self._images.read(index)) if stored is None else stored


def random_crop(
    image: Pixels, shown_at: Resolution, chance: Augmentation, numbers: Sequence[float], into: Pixels
) -> None:
    """Write a random crop of ``image``, not flipped, to ``into``, uint8 [size, size, 3].

    Args:
        image: The image.
        shown_at: Size of the crop, and the shorter side to which an image is resized before it is padded.
        chance: Kind of crop.
        numbers: Random numbers that ``chance`` drew for this image.
        into: Memory for the crop.
    """
    if chance.padding is None:
        window = chance.window(image.shape[0], image.shape[1], numbers)
        resized(image[window.rows, window.columns], shown_at.size, shown_at.size, into=into)
        return
    image = _scaled(image, shown_at.shorter)
    window = chance.padded_window(image.shape[0], image.shape[1], shown_at.size, numbers)
    into[:] = mirror_padded(image, chance.padding)[window.rows, window.columns]


def mirror_padded(image: Pixels, padding: int) -> Pixels:
    """Enlarge each side of an image by ``padding`` pixels of its mirror image, without repeating its outermost ones."""
    height, width, channels = image.shape
    padded = np.empty((height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
    cv2.copyMakeBorder(image, padding, padding, padding, padding, cv2.BORDER_REFLECT_101, dst=padded)
    return padded


def central_crop(image: Pixels, shown_at: Resolution) -> Pixels:
    """Resize an image to the shorter side ``shown_at.shorter`` and return its centre, [size, size, 3]."""
    size, shorter = shown_at
    image = _scaled(image, shorter)
    top, left = middle_of(image.shape[:2], size)
    return image[top : top + size, left : left + size]


def _scaled(image: Pixels, shorter: int) -> Pixels:
    image = without_ends(image)
    return resized(image, *scaled_size(image.shape[0], image.shape[1], shorter))
