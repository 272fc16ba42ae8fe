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
from imagenet_fast.data.imagefolder import scan
from imagenet_fast.data.order import EvalOrder, TrainOrder
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
class Dataset:
    """Both splits as one rank reads them."""

    classes: int
    train_order: TrainOrder
    val_order: EvalOrder
    train: Iterator[Batch]
    """Micro-batches of epoch after epoch, without end."""
    val: Iterator[Batch]
    """Evaluation after evaluation, without end."""

    def next_evaluation(self) -> Iterator[Batch]:
        """This rank's batches of one evaluation."""
        return islice(self.val, self.val_order.batches)


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
    match data:
        case schema.SyntheticData():
            sizes, classes = (data.train_images, data.val_images), data.classes
        case schema.ImageData():
            assert root is not None
            train_folder, val_folder = scan(root)
            sizes, classes = (len(train_folder), len(val_folder)), len(train_folder.classes)
        case _:
            assert_never(data)
    train_order = TrainOrder(sizes[0], batching, rank, seed, first_step)
    val_order = EvalOrder(sizes[1], batching.micro_batch, batching.ranks, rank)
    if not train_order.steps_per_epoch:
        raise UserError(
            f"the training set has {sizes[0]} images, fewer than one global batch of {batching.global_batch}; "
            f"--set global_batch={sizes[0]} or less, or give more images"
        )
    match data:
        case schema.SyntheticData():
            train: Loader = SyntheticLoader(train_order, data, device, seed)
            val: Loader = SyntheticLoader(val_order, data, device, seed)
        case schema.ImageData():
            load = DaliLoader if data.loader == "dali" else FolderLoader
            workers = min(data.workers, max(1, usable_cores() // local_ranks))
            train = load(train_folder, train_order, data, device, workers)
            val = load(val_folder, val_order, data, device, workers)
    return Dataset(classes, train_order, val_order, iter(train), iter(val))
