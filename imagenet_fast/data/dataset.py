"""Where batches come from, by a recipe's ``[data]`` table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, assert_never

import torch
from torch import Tensor

from imagenet_fast.data.dali import DaliLoader
from imagenet_fast.data.folder import FolderLoader
from imagenet_fast.data.imagefolder import ImageFolder, scan_training, scan_validation
from imagenet_fast.data.order import EvalOrder, Order, TrainOrder
from imagenet_fast.data.synthetic import SyntheticLoader
from imagenet_fast.errors import UserError
from imagenet_fast.ranks.cores import usable_cores
from imagenet_fast.recipe import schema
from imagenet_fast.recipe.batching import Batching

Batch = tuple[Tensor, Tensor]


class Loader(Protocol):
    """Batches without end: images fp32 [n, 3, S, S] in channels_last memory and labels int64 [n], on the device."""

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Validation:
    """The validation split as one rank reads it."""

    classes: int
    class_names: list[str]
    """By label; nothing for pictures that are made up."""
    val_order: EvalOrder
    val: Iterator[Batch]
    """Evaluation after evaluation, without end."""

    def next_evaluation(self) -> Iterator[Batch]:
        """This rank's batches of one evaluation."""
        return islice(self.val, self.val_order.batches)


@dataclass(frozen=True)
class Dataset(Validation):
    """Both splits as one rank reads them."""

    train_order: TrainOrder
    train: Iterator[Batch]
    """Micro-batches of epoch after epoch, without end."""


def open_dataset(
    data: schema.Data,
    root: Path | None,
    batching: Batching,
    rank: int,
    local_ranks: int,
    device: torch.device,
    seed: int,
    first_step: int = 0,
) -> Dataset:
    """Make this rank's loaders; ``root`` is not read for synthetic data. Training begins with the batches of step
    ``first_step``, counted over all epochs, which are what loaders opened at 0 give then, on any number of ranks.

    Raises UserError where the pictures cannot be trained on, or not with this batch.
    """
    folder = None
    match data:
        case schema.SyntheticData():
            images = data.train_images
        case schema.ImageData():
            assert root is not None
            folder = scan_training(root)
            images = len(folder)
        case _:
            assert_never(data)
    order = TrainOrder(images, batching, rank, seed, first_step)
    if not order.steps_per_epoch:
        raise UserError(
            f"the training set has {images} images, fewer than one global batch of {batching.global_batch}; "
            f"--set global_batch={images} or less, or give more images"
        )
    validation = open_validation(data, root, batching, rank, local_ranks, device, seed)
    train = _open(data, folder, order, local_ranks, device, seed)
    return Dataset(**vars(validation), train_order=order, train=iter(train))


def open_validation(
    data: schema.Data,
    root: Path | None,
    batching: Batching,
    rank: int,
    local_ranks: int,
    device: torch.device,
    seed: int,
) -> Validation:
    """Make this rank's loader of the validation split, in micro-batches; the training split need not be there."""
    folder = None
    names: list[str] = []
    match data:
        case schema.SyntheticData():
            images, classes = data.val_images, data.classes
        case schema.ImageData():
            assert root is not None
            folder = scan_validation(root)
            images, classes, names = len(folder), len(folder.classes), folder.classes
        case _:
            assert_never(data)
    order = EvalOrder(images, batching.micro_batch, batching.ranks, rank)
    return Validation(classes, names, order, iter(_open(data, folder, order, local_ranks, device, seed)))


def _open(
    data: schema.Data,
    folder: ImageFolder | None,
    order: Order,
    local_ranks: int,
    device: torch.device,
    seed: int,
) -> Loader:
    match data:
        case schema.SyntheticData():
            return SyntheticLoader(order, data, device, seed)
        case schema.ImageData():
            assert folder is not None
            workers = min(data.workers, max(1, usable_cores() // local_ranks))
            load = DaliLoader if data.loader == "dali" else FolderLoader
            return load(folder, order, data, device, workers)
        case _:
            assert_never(data)
