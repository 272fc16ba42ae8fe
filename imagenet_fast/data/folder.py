"""torchvision's transforms in worker processes, for machines that DALI does not run on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from imagenet_fast.data.imagefolder import ImageFolder
from imagenet_fast.data.order import Order, TrainOrder
from imagenet_fast.ranks.forking import end_with_starter, start_fork_server
from imagenet_fast.recipe import schema


class FolderLoader:
    """Batches in ``order``, without end: images fp32 [n, 3, S, S] in channels_last memory, labels int64 [n]."""

    def __init__(
        self,
        folder: ImageFolder,
        order: Order,
        data: schema.ImageData,
        device: torch.device,
        seed: int,
        workers: int,
    ) -> None:
        start_fork_server(__name__)
        augment = isinstance(order, TrainOrder) and data.augment
        self._device = device
        self._batches: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            _Pictures(folder, _transform(data, augment)),
            batch_sampler=order,  # type: ignore[arg-type]  # endless, which torch's Sampler type does not foresee
            num_workers=workers,
            pin_memory=device.type == "cuda",
            multiprocessing_context="forkserver",  # a fork of the rank would inherit its threads half-way
            worker_init_fn=_end_with_rank,
            generator=torch.Generator().manual_seed(seed),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._batches:
            images = images.to(self._device, non_blocking=True, memory_format=torch.channels_last)
            yield images, labels.to(self._device, non_blocking=True)


def _end_with_rank(worker: int) -> None:
    end_with_starter()


class _Pictures(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, folder: ImageFolder, transform: v2.Compose) -> None:
        self._folder = folder
        self._transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Image.open(self._folder.paths[index]) as picture:
            return self._transform(picture.convert("RGB")), torch.tensor(self._folder.labels[index])


def _transform(data: schema.ImageData, augment: bool) -> v2.Compose:
    crop: list[v2.Transform]
    if augment:
        crop = [
            v2.RandomResizedCrop(data.image_size, scale=data.crop_area),
            v2.RandomHorizontalFlip(0.5 * data.flip),
        ]
    else:
        crop = [v2.Resize(data.resize), v2.CenterCrop(data.image_size)]
    normalise = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]
    return v2.Compose([*crop, *normalise])
