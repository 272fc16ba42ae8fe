"""Copy batches to the device as bytes, a quarter of the size of fp32, then normalise and mix images there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from imagenet_fast.data.order import BatchIndices, bits
from imagenet_fast.recipe.data_config import Data

T = TypeVar("T")

_GRAIN = 32_768
"""Number of values that a CPU normalises at a time.

They stay in its cache from one operation to the next. For no more than these, torch uses a single thread. That is
faster here than two: other threads decode meanwhile, and the two would wait for each other.
"""


class Batch(NamedTuple):
    """Images uint8 [n, 3, S, S] in channels_last memory, labels int64 [n], and the place of the batch in its order."""

    images: Tensor
    labels: Tensor
    indices: BatchIndices


def copied(batches: Iterable[T], device: torch.device, move: Callable[[T, torch.device], Batch]) -> Iterator[Batch]:
    """Yield ``move(batch, device)`` for each of the ``batches``.

    To a GPU they are moved from pinned memory on a stream of their own, each while the one before it is trained on.
    """
    if device.type != "cuda":
        yield from (move(batch, device) for batch in batches)
        return
    side, moving = torch.cuda.Stream(device), deque[tuple[Batch, torch.cuda.Event]]()
    for batch in batches:
        with torch.cuda.stream(side):
            moving.append((move(batch, device), side.record_event()))
        if len(moving) > 1:
            yield _arrived(*moving.popleft(), device)
    while moving:
        yield _arrived(*moving.popleft(), device)


def _arrived(batch: Batch, there: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(there)
    for values in (batch.images, batch.labels):
        values.record_stream(current)  # their memory is not used again while this stream may read it
    return batch


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on ``device``, to which it is copied without waiting."""
    images, labels = (values.to(device, non_blocking=True) for values in (batch.images, batch.labels))
    return Batch(images, labels, batch.indices)


class Normalizer:
    """Normalise images for a network: (x / 255 - mean) / std per channel, computed in fp32 and rounded once."""

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype, channels_last: bool = True) -> None:
        """Compute the scale and shift of each channel by the recipe's ``[data]`` table.

        Without ``channels_last`` the memory of normalised images is contiguous, which costs a copy.
        """
        mean, std = torch.tensor([data.mean, data.std], dtype=torch.float64)
        widest = max(data.image_size, data.evaluated_size, *(size for _, size in data.sizes), 1)
        # Repeated for a whole row of pixels: three channels alone are too few for vector instructions.
        self._scale = (1 / (255 * std)).float().repeat(widest).to(device)
        self._shift = (-mean / std).float().repeat(widest).to(device)
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Return images uint8 [n, 3, S, S] normalised."""
        pixels = images.permute(0, 2, 3, 1)
        scale, shift = (values[: 3 * pixels.shape[2]] for values in (self._scale, self._shift))
        rows = pixels.reshape(-1, len(scale))
        if rows.is_cuda:  # one kernel casts, computes and rounds
            normalised = torch.empty(rows.shape, dtype=self._dtype, device=rows.device)
            torch.addcmul(shift, rows, scale, out=normalised)
        else:
            normalised = empty(rows.shape, self._dtype)
            few = max(1, _GRAIN // len(scale))
            for some, place in zip(rows.split(few), normalised.split(few), strict=True):
                torch.addcmul(shift, some.float(), scale, out=place)
        return normalised.view(pixels.shape).permute(0, 3, 1, 2).contiguous(memory_format=self._format)


class Mixer:
    """Mix each image of a micro-batch with the one before it, by torchvision.

    The methods are mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899). With both, each
    micro-batch uses one or the other. All random draws are a function of (seed, epoch, first image of the micro-batch).
    So micro-batches are the same on any number of ranks.
    """

    def __init__(self, seed: int, classes: int, mixup: float, cutmix: float) -> None:
        """Choose the methods by their alphas, of the Beta distributions that shares are drawn from; 0: not that one."""
        from torchvision.transforms import v2  # loads torch's compiler

        self._seed = seed
        self._ways = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
        self._ways += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []

    def __call__(self, images: Tensor, labels: Tensor, indices: BatchIndices) -> tuple[Tensor, Tensor]:
        """Return mixed images, in memory like that of ``images``, and shares of the classes, fp32 [n, classes]."""
        number = int(bits("mixing", self._seed, indices.epoch, of=indices.images[:1])[0])
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the CPU generator, and so does the model
            torch.default_generator.manual_seed(number)
            mixed, shares = self._ways[number % len(self._ways)](images, labels)
        return mixed if mixed.stride() == images.stride() else torch.empty_like(images).copy_(mixed), shares


def empty(shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Return an uninitialised tensor, pinned or in memory from NumPy, which asks for huge pages.

    The first touch of a large tensor takes a third of the time that small pages take. For one image, small
    pages would take half of a crop's time.
    """
    if pinned:
        return torch.empty(*shape, dtype=dtype, device="cpu", pin_memory=True)
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
