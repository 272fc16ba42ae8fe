"""torchvision's transforms in worker processes, for machines that DALI does not run on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from imagenet_fast.data.augmentation import Augmentation, augmentation_of
from imagenet_fast.data.imagefolder import ImageFolder
from imagenet_fast.data.order import MicroBatch, Order
from imagenet_fast.ranks.forking import end_with_starter, start_fork_server
from imagenet_fast.recipe import schema


class FolderLoader:
    """Batches in ``order``, without end: images fp32 [n, 3, S, S] in channels_last memory, labels int64 [n]."""

    def __init__(
        self, folder: ImageFolder, order: Order, data: schema.ImageData, device: torch.device, workers: int
    ) -> None:
        start_fork_server(__name__)
        self._device = device
        self._batches: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            _Pictures(folder, data, augmentation_of(data, order)),
            batch_sampler=order,  # type: ignore[arg-type]  # endless, of micro-batches: unforeseen by torch's Sampler
            num_workers=workers,
            pin_memory=device.type == "cuda",
            multiprocessing_context="forkserver",  # a fork of the rank would inherit its threads half-way
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # for seeds that no worker needs; else they were drawn from the model's
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._batches:
            images = images.to(self._device, non_blocking=True, memory_format=torch.channels_last)
            yield images, labels.to(self._device, non_blocking=True)


def _end_with_rank(worker: int) -> None:
    end_with_starter()


class _Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Read by micro-batches, as torch's workers ask for them."""

    def __init__(self, folder: ImageFolder, data: schema.ImageData, augmentation: Augmentation | None) -> None:
        self._folder = folder
        self._size = [data.image_size, data.image_size]
        self._augmentation = augmentation
        self._central = v2.Compose([v2.Resize(data.resize), v2.CenterCrop(data.image_size)])
        self._normalised = v2.Compose(
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]
        )

    def __getitems__(self, batch: MicroBatch) -> list[tuple[Tensor, Tensor]]:
        crops = self._central_crops(batch) if self._augmentation is None else self._crops(batch, self._augmentation)
        labels = torch.from_numpy(self._folder.labels[batch.pictures])
        return [(self._normalised(crop), label) for crop, label in zip(crops, labels, strict=True)]

    def _central_crops(self, batch: MicroBatch) -> Iterator[Image.Image]:
        return (self._central(self._picture(index)) for index in batch.pictures)

    def _crops(self, batch: MicroBatch, augmentation: Augmentation) -> Iterator[Image.Image]:
        numbers, flips = augmentation.draw(batch)
        for index, drawn, flip in zip(batch.pictures, numbers.tolist(), flips, strict=True):
            picture = self._picture(index)
            window = augmentation.window(picture.height, picture.width, drawn)
            crop = functional.resized_crop(picture, *window, self._size)
            yield functional.horizontal_flip(crop) if flip else crop

    def _picture(self, index: int) -> Image.Image:
        with Image.open(self._folder.paths[index]) as picture:
            return picture.convert("RGB")
