"""Load stored pixels for a GPU, which resizes them: the CPU only copies the rows of each image that are shown.

A set that fits lives on the GPU, decoded; then the CPU only says what is shown.

Shards are read, not mapped: a mapping of a shard that is cut, or on a disk that fails, would end the process.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from imagenet_fast.data.crops import Sides, crops_of, resample
from imagenet_fast.data.device import Batch, copied, empty
from imagenet_fast.data.index import map_in_order
from imagenet_fast.data.loader import Job, ThreadLoader, prefetched
from imagenet_fast.data.order import BatchIndices, Order, augmentation_of, resolution
from imagenet_fast.data.pixels import ImageDecodeError, Pixels, decode
from imagenet_fast.data.shards import Shards
from imagenet_fast.data.source import ImageSource, patiently
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.units import gigabytes

_LARGEST = 512
"""Sides, in pixels, of images up to which the GPU resizes them; the CPU resizes larger ones."""

_MULTIPLE = 16
"""Sides of tiles are multiples of this, as a GPU's fast products of matrices want."""

_MOST, _SHARE = 4 << 30, 0.25
"""The most bytes, and the most of a GPU's free memory, that images take by themselves."""

_SAMPLE = 16  # images by which it is judged how many bytes all take


class Resident(NamedTuple):
    """All images of a split on a device."""

    pixels: Tensor
    """Their pixels one after another, uint8, and some bytes more than the longest row has."""
    begins: NDArray[np.int64]
    """The first byte of each, [images]."""
    pixel_sides: Sides
    """Their heights and widths, [images, 2]."""


@dataclass
class _Tiles:
    """A batch of n images before they are resized."""

    indices: BatchIndices
    labels: Tensor
    places: Tensor
    """The ``places`` that ``resample`` takes."""
    rows: Tensor
    """Of each tile: its first byte in ``pixels``, the bytes from one row to the next, its rows; int64 [3, n]."""
    pixels: Tensor
    """Rows of images one after another, uint8; of resident images all rows, on the device."""
    height: int = 0
    width: int = 0
    """Pixels of each tile."""


class PixelLoader:
    """Endless batches in ``order``, whose pixels are within two grey levels of ``ThreadLoader``'s."""

    def __init__(
        self, images: ImageSource, order: Order, data: ImageData, device: torch.device, threads: int,
        resident: Resident | None = None,
    ) -> None:  # fmt: skip
        """Read ``images``, which are in shards unless they are ``resident``, with ``threads``; ``device`` resizes."""
        every = resident or images
        assert isinstance(every, Resident | Shards)
        self._every = every
        self._labels = images.labels
        self._order = order
        self._data = data
        self._augmentation = augmentation_of(data, order)
        self._device = device
        self._threads = threads
        self._slowly = ThreadLoader(images, order, data, device, threads)
        """Loads images that are not stored as pixels, could not be read, or are large."""
        self._unread: set[int] = set()
        """Indices of images that could not be read."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end. Raises UserError if a bad image must not or cannot be replaced."""
        filled = prefetched(map(self._begin, self._order), self._threads, self._data.prefetch)
        return copied(filled, self._device, self._resized)

    def _begin(self, indices: BatchIndices) -> tuple[_Tiles, list[Job]]:
        """Allocate a batch and return it with the job that fills it; no pinned memory may be allocated elsewhere."""
        images, count, pinned = indices.images, len(indices.images), self._device.type == "cuda"
        size = resolution(self._data, self._order, indices).size
        sides = self._every.pixel_sides[images]
        stored = resizable(sides) & ~np.isin(images, list(self._unread))
        sides[~stored] = size
        resident = self._every.pixels if isinstance(self._every, Resident) else None
        pixels = empty((_length(sides),), torch.uint8, pinned) if resident is None else resident
        labels, places = empty((count,), torch.int64, pinned), empty((2, count, 3 + size), torch.int32, pinned)
        batch = _Tiles(indices, labels, places, empty((3, count), torch.int64, pinned), pixels)
        return batch, [self._fill(batch, sides, stored)]

    def _fill(self, batch: _Tiles, sides: Sides, stored: NDArray[np.bool_]) -> Job:
        """Read what is shown of the ``stored`` images, in one step, and load the others, one per step."""
        indices, size = batch.indices, batch.places.shape[2] - 3
        crops = crops_of(sides, resolution(self._data, self._order, indices), self._augmentation, indices)
        crops.leave(~stored)
        first, count = crops.needed()
        row_bytes = 3 * sides[:, 1].astype(np.int64)
        height, width = (-(-count.max(0) // _MULTIPLE) * _MULTIPLE).tolist()
        batch.labels.numpy()[:] = self._labels[indices.images]
        if isinstance(self._every, Resident):
            begins = self._every.begins[indices.images] + first[:, 0] * row_bytes
        else:
            ends = np.cumsum(count[:, 0] * row_bytes)
            begins = ends - count[:, 0] * row_bytes
            memory = batch.pixels.numpy()
            parts = [memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            self._every.readahead(indices.images)
            read = np.flatnonzero(stored)
            if failed := self._every.read_rows(indices.images[read], first[read, 0], [parts[row] for row in read]):
                self._unread.update(indices.images[read[failed]].tolist())
                stored[read[failed]], sides[read[failed]] = False, size
                batch.pixels = empty((_length(sides),), torch.uint8)
                yield from self._fill(batch, sides, stored)
                return
            yield from self._fill_others(batch, np.flatnonzero(~stored).tolist(), parts)
            batch.pixels = batch.pixels[: int(ends[-1]) + 3 * width]
        batch.height, batch.width = height, width
        batch.rows.numpy()[:] = begins + 3 * first[:, 1], row_bytes, count[:, 0]
        batch.places.numpy()[:] = crops.places(first)
        yield

    def _fill_others(self, batch: _Tiles, rows: list[int], parts: list[Pixels]) -> Job:
        """Load the crops of the images in these rows of a batch into their ``parts``."""
        indices = batch.indices
        sizes = resolution(self._data, self._order, indices)
        draws = self._slowly.draws(indices._replace(images=indices.images[rows]))
        for row, drawn in zip(rows, draws, strict=False):
            crop = parts[row].reshape(sizes.size, sizes.size, 3)
            batch.labels[row] = self._slowly.show(int(indices.images[row]), indices.epoch, sizes, drawn, crop)
            yield

    def _resized(self, batch: _Tiles, device: torch.device) -> Batch:
        """Return a batch on the device, resized there; nothing waits."""
        labels, places, pixels, rows = (
            values.to(device, non_blocking=True) for values in (batch.labels, batch.places, batch.pixels, batch.rows)
        )
        begins, row_bytes, last = rows[0, :, None], rows[1, :, None], rows[2, :, None] - 1
        starts = begins + row_bytes * torch.minimum(torch.arange(batch.height, device=device), last)
        wide = 3 * batch.width
        every_row = pixels.as_strided((len(pixels) - wide + 1, wide), (1, 1))  # one begins at each byte
        tiles = every_row[starts].view(*starts.shape, batch.width, 3)
        return Batch(resample(tiles, places), labels, batch.indices)


def resizable(sides: Sides) -> NDArray[np.bool_]:
    """Return whether the GPU can resize each stored image of these sides, [n]; those of others are 0."""
    fits: NDArray[np.bool_] = (sides.min(1) > 0) & (sides.max(1) <= _LARGEST)
    return fits


def _length(sides: Sides) -> int:
    """Return the bytes of images of these sides, and of one row of a tile."""
    return 3 * int(sides.prod(1, dtype=np.int64).sum() + sides.max() + _MULTIPLE)


def resident_on(device: torch.device, images: ImageSource, data: ImageData) -> Resident | None:
    """Return all images on ``device``, decoded, if ``data.resident`` wants them there; else None.

    Raises:
        UserError: They are to be there, and one is large or not sound.
    """
    if data.resident is False or (data.resident == "auto" and device.type != "cuda"):
        return None
    most = math.inf if data.resident is True else min(_MOST, _SHARE * torch.cuda.mem_get_info(device)[0])
    whole = partial(_whole, images)
    try:
        sample = [whole(index).nbytes for index in np.linspace(0, len(images) - 1, _SAMPLE).astype(int).tolist()]
        if len(images) * sum(sample) / _SAMPLE > most:
            return None
        every = deque(map_in_order(whole, range(len(images))))
    except _Unfit as error:
        if data.resident is True:
            raise UserError(f"{error}, so images cannot live on the device; --set data.resident=false") from None
        return None
    sides = np.array([pixels.shape[:2] for pixels in every], np.int32)
    if _length(sides) > most:
        return None
    ends = np.cumsum(3 * sides.prod(1, dtype=np.int64))
    begins, pixels = np.concatenate(([0], ends[:-1])), np.empty(_length(sides), np.uint8)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        pixels[begin:end] = every.popleft().reshape(-1)
    there = torch.from_numpy(pixels).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams read them
    if os.environ.get("RANK", "0") == "0":
        print(f"{len(images)} images live on the device: {gigabytes(len(pixels))}", file=sys.stderr)
    return Resident(there, begins, sides)


class _Unfit(Exception):
    """Error for an image that cannot live on a device. The message says which and why."""


def _whole(images: ImageSource, index: int) -> Pixels:
    try:
        pixels = patiently(images, index, lambda index: decode(images.read(index)))
    except (ImageDecodeError, OSError) as error:
        raise _Unfit(f"{images.name(index)} cannot be read ({error})") from None
    if max(pixels.shape) > _LARGEST:
        raise _Unfit(f"{images.name(index)} has more than {_LARGEST} pixels a side")
    return pixels
