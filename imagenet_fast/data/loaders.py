"""Build the loaders that a recipe's ``[data]`` table describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from imagenet_fast.data import dali_loader, format_detection
from imagenet_fast.data.fingerprint import Contents, contents, contents_of_split
from imagenet_fast.data.image_source import ImageSource
from imagenet_fast.data.normalize import Normalizer
from imagenet_fast.data.sampler import EvalSampler, Order, TrainSampler
from imagenet_fast.data.thread_loader import FolderLoader
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import Data, ImageData, SyntheticData

_EXAMPLES, _EXAMPLES_AT_ONCE = 5000, 100

Batch = tuple[Tensor, Tensor]

_BANK = 256  # number of different images of a synthetic loader; image i is image i modulo this


class Loader(Protocol):
    """Endless batches on the device: images uint8 [n, 3, S, S] in channels_last memory, labels int64 [n]."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield (images, labels) without end."""
        ...


@dataclass(frozen=True)
class ValLoader:
    """One rank's loader of the validation split."""

    classes: int
    class_names: list[str]
    """Names of the classes by label; empty for synthetic images."""
    val_contents: dict[str, Any]
    val_order: EvalSampler
    val: Iterator[Batch]
    """Batches of one evaluation after another, without end."""

    def next_evaluation(self) -> Iterator[Batch]:
        """Return an iterator over this rank's batches of one evaluation."""
        return islice(self.val, self.val_order.batches)


@dataclass(frozen=True)
class Loaders(ValLoader):
    """One rank's loaders of both splits."""

    contents: Contents
    train_order: TrainSampler
    train: Iterator[Batch]
    """Micro-batches of one epoch after another, without end."""


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
    channels_last: bool = True,
) -> Loaders:
    """Build this rank's loaders of both splits, with normalised images.

    Args:
        data: The recipe's ``[data]`` table.
        root: Data directory; not read for synthetic data.
        batching: How the global batch is split over the ranks.
        rank: This rank.
        cores: Largest number of decoding threads.
        device: Device of the batches.
        seed: Seed of the order of images, of augmentation and of synthetic images.
        first_step: Step at which training begins, counted over all epochs. Its batches are those that loaders built
            with 0 give at that step, on any number of ranks.
        dtype: Data type of the normalised images.
        channels_last: Whether they are in channels_last memory.

    Raises:
        UserError: If the images cannot be trained on, or not with this batch.
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
    validation = open_validation(data, root, batching, rank, cores, device, seed, dtype, channels_last)
    train: Iterable[Batch] = _open(data, source, order, cores, device, seed, dtype, channels_last)
    if isinstance(data, ImageData) and (data.mixup or data.cutmix):
        from imagenet_fast.data.mixup import MixupCutmix  # loads torchvision, and with it torch's compiler

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
    channels_last: bool = True,
) -> ValLoader:
    """Build this rank's loader of the validation split, in micro-batches of normalised images.

    The training split need not exist.

    Args:
        data: The recipe's ``[data]`` table.
        root: Data directory; not read for synthetic data.
        batching: How the global batch is split over the ranks.
        rank: This rank.
        cores: Largest number of decoding threads.
        device: Device of the batches.
        seed: Seed of synthetic images.
        dtype: Data type of the normalised images.
        channels_last: Whether they are in channels_last memory.

    Raises:
        UserError: If the images cannot be evaluated on.
    """
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
    val = iter(_open(data, source, order, cores, device, seed, dtype, channels_last))
    return ValLoader(classes, names, contents_of_split(images, source), order, val)


def _open(
    data: Data,
    images: ImageSource | None,
    order: Order,
    cores: int,
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    channels_last: bool,
) -> Normalizer:
    loader = open_loader(data, images, order, cores, device, seed)
    return Normalizer(loader, data, device, dtype, channels_last)


def open_loader(
    data: Data,
    images: ImageSource | None,
    order: Order,
    cores: int,
    device: torch.device,
    seed: int,
) -> Loader:
    """Build the loader that ``data`` describes; its batches hold bytes, not normalised.

    Args:
        data: The recipe's ``[data]`` table.
        images: The images to read; None for synthetic data.
        order: This rank's batches of indices.
        cores: Largest number of decoding threads.
        device: Device of the batches.
        seed: Seed of synthetic images.

    Raises:
        UserError: If the loader cannot be used.
    """
    match data:
        case SyntheticData():
            return SyntheticLoader(order, data, device, seed)
        case ImageData():
            assert images is not None
            load = dali_loader.DaliLoader if data.loader == "dali" else FolderLoader
            return load(images, order, data, device, min(data.workers or cores, cores))
        case _:
            assert_never(data)


def example_images(data: Data, root: Path | None, seed: int) -> Iterator[Tensor]:
    """Yield batches of normalised training images, not augmented, from which a model can compute initial weights.

    They are chosen by ``seed`` alone, so they are the same for any loader and any number of ranks.

    Args:
        data: The recipe's ``[data]`` table.
        root: Data directory; not read for synthetic data.
        seed: Seed of the order of images, of which the first 5000 are taken.

    Yields:
        Images fp32 [n, 3, S, S] on the CPU.

    Raises:
        UserError: If the images cannot be read.
    """
    source = None
    match data:
        case SyntheticData():
            count = data.train_images
        case ImageData():
            assert root is not None
            source = format_detection.open_training(root)
            count = len(source)
            data = data.model_copy(update={"augment": False, "loader": "folder"})
        case _:
            assert_never(data)
    batch = min(count, _EXAMPLES_AT_ONCE)
    order = TrainSampler(count, Batching(1, batch, 1), 0, seed)
    batches = min(_EXAMPLES // batch, order.steps_per_epoch)
    examples = _open(data, source, order, 1, torch.device("cpu"), seed, torch.float32, True)
    yield from (images for images, _ in islice(examples, batches))


class SyntheticLoader:
    """Endless batches in ``order``, in the form of the other loaders. Image i has label i mod classes."""

    def __init__(self, order: Order, data: SyntheticData, device: torch.device, seed: int) -> None:
        """Create the random images from ``seed``, and copy them to ``device``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (_BANK, data.image_size, data.image_size, 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self._images = pixels.to(device).permute(0, 3, 1, 2)
        self._order = order
        self._classes = data.classes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images uint8 [n, 3, S, S] in channels_last memory, and labels int64 [n]."""
        device = self._images.device
        for _, indices, _ in self._order:
            chosen = torch.from_numpy(indices).to(device, non_blocking=True)
            yield self._images[chosen % _BANK], chosen % self._classes
