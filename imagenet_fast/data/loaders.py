"""Where batches come from, by a recipe's ``[data]`` table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from imagenet_fast.data import dali_loader, format_detection
from imagenet_fast.data.decoded_cache import some_sizes
from imagenet_fast.data.fingerprint import Contents, contents, contents_of_split
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.mixup import MixupCutmix
from imagenet_fast.data.normalize import Normalizer
from imagenet_fast.data.paths import cache_dir
from imagenet_fast.data.sampler import EvalSampler, Order, TrainSampler
from imagenet_fast.data.stall_advice import InputPipeline
from imagenet_fast.data.synthetic import SyntheticLoader
from imagenet_fast.data.thread_loader import FolderLoader
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import Data, ImageData, SyntheticData

Batch = tuple[Tensor, Tensor]

_LOOKED_AT = 50
"""Images whose sizes stand for those of all."""


class Loader(Protocol):
    """Batches without end: images uint8 [n, 3, S, S] in channels_last memory and labels int64 [n], on the device."""

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class ValLoader:
    """The validation split as one rank reads it."""

    classes: int
    class_names: list[str]
    """By label; nothing for images that are made up."""
    val_contents: dict[str, Any]
    val_order: EvalSampler
    val: Iterator[Batch]
    """Evaluation after evaluation, without end."""

    def next_evaluation(self) -> Iterator[Batch]:
        """This rank's batches of one evaluation."""
        return islice(self.val, self.val_order.batches)


@dataclass(frozen=True)
class Loaders(ValLoader):
    """Both splits as one rank reads them."""

    contents: Contents
    train_order: TrainSampler
    train: Iterator[Batch]
    """Micro-batches of epoch after epoch, without end."""


def build_loaders(
    data: Data,
    root: Path | None,
    batching: Batching,
    rank: int,
    cores: int,
    device: torch.device,
    seed: int,
    first_step: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Loaders:
    """Make this rank's loaders; ``root`` is not read for synthetic data. Training begins with the batches of step
    ``first_step``, counted over all epochs, which are what loaders opened at 0 give then, on any number of ranks.
    Images are decoded by at most ``cores`` threads, and normalised, in ``dtype``.

    Raises UserError where the images cannot be trained on, or not with this batch.
    """
    source = None
    match data:
        case SyntheticData():
            images = data.train_images
        case ImageData():
            assert root is not None
            source = format_detection.open_training(root)
            images = len(source)
        case _:
            assert_never(data)
    order = TrainSampler(images, batching, rank, seed, first_step)
    if not order.steps_per_epoch:
        raise UserError(
            f"the training set has {images} images, fewer than one global batch of {batching.global_batch}; "
            f"--set global_batch={images} or less, or give more images"
        )
    validation = open_validation(data, root, batching, rank, cores, device, seed, dtype)
    train: Iterable[Batch] = _open(data, source, order, cores, device, seed, dtype)
    if isinstance(data, ImageData) and (data.mixup or data.cutmix):
        train = MixupCutmix(train, order, validation.classes, data.mixup, data.cutmix)
    found = contents(validation.class_names, contents_of_split(images, source), validation.val_contents)
    return Loaders(**vars(validation), contents=found, train_order=order, train=iter(train))


def open_validation(
    data: Data,
    root: Path | None,
    batching: Batching,
    rank: int,
    cores: int,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> ValLoader:
    """Make this rank's loader of the validation split, in micro-batches; the training split need not be there.
    Images are normalised, in ``dtype``."""
    source = None
    names: list[str] = []
    match data:
        case SyntheticData():
            images, classes = data.val_images, data.classes
        case ImageData():
            assert root is not None
            source = format_detection.open_validation(root)
            images, classes, names = len(source), len(source.classes), source.classes
        case _:
            assert_never(data)
    order = EvalSampler(images, batching.micro_batch, batching.ranks, rank)
    val = iter(_open(data, source, order, cores, device, seed, dtype))
    return ValLoader(classes, names, contents_of_split(images, source), order, val)


def _open(
    data: Data,
    images: ImageSource | None,
    order: Order,
    cores: int,
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
) -> Normalizer:
    loader = open_loader(data, images, order, cores, device, seed)
    return Normalizer(loader, data, device, dtype)


def open_loader(
    data: Data,
    images: ImageSource | None,
    order: Order,
    cores: int,
    device: torch.device,
    seed: int,
) -> Loader:
    """What gives the ``images``, or made up ones, in ``order``, as bytes."""
    match data:
        case SyntheticData():
            return SyntheticLoader(order, data, device, seed)
        case ImageData():
            assert images is not None
            load = dali_loader.DaliLoader if data.loader == "dali" else FolderLoader
            return load(images, order, data, device, min(data.workers or cores, cores))
        case _:
            assert_never(data)


def supply_of(data: ImageData, root: Path, cores: int, device: torch.device) -> InputPipeline:
    """What the images of a rank come through, after a look at some of them. Raises UserError, and OSError."""
    short_side = None
    if format_detection.find_split(root, "train").format == "folder":
        sides = [min(size) for size in some_sizes(format_detection.open_training(root), _LOOKED_AT)]
        short_side = fmean(sides) if sides else None
    gpu = device.type == "cuda"
    return InputPipeline(data, gpu, cores, dali_loader.is_installed(), short_side, root, cache_dir())
