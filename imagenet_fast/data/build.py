"""Build the loaders that a recipe's ``[data]`` table describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor

from imagenet_fast.data.dali import DaliLoader
from imagenet_fast.data.device import Batch, Mixer, Normalizer
from imagenet_fast.data.fingerprint import Contents, contents, contents_of_split
from imagenet_fast.data.loader import ThreadLoader
from imagenet_fast.data.order import EvalSampler, Order, TrainSampler
from imagenet_fast.data.pixel_loader import PixelLoader, resident_on, resizable
from imagenet_fast.data.shards import Shards
from imagenet_fast.data.source import ImageSource, SplitName, open_training, open_validation
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import Data, ImageData, SyntheticData

_EXAMPLES, _EXAMPLES_AT_ONCE = 5000, 100

_BANK = 256  # number of different images of a synthetic loader; image i is image i modulo this


@dataclass(frozen=True)
class ValLoader:
    """One rank's loader of the validation split."""

    classes: int
    class_names: list[str]
    """Names of the classes by label; empty for synthetic images."""
    val_contents: dict[str, Any]
    val_order: EvalSampler
    val: Iterator[tuple[Tensor, Tensor]]
    """Batches of one evaluation after another, without end."""

    def next_evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over this rank's batches of one evaluation."""
        return islice(self.val, self.val_order.batches)


@dataclass(frozen=True)
class Loaders(ValLoader):
    """One rank's loaders of both splits."""

    contents: Contents
    train_order: TrainSampler
    train: Iterator[tuple[Tensor, Tensor]]
    """Micro-batches of one epoch after another, without end."""


def build_loaders(
    data: Data, root: Path | None, batching: Batching, rank: int, cores: int, device: torch.device, seed: int,
    first_step: int = 0, dtype: torch.dtype = torch.float32, channels_last: bool = True,
) -> Loaders:  # fmt: skip
    """Build this rank's loaders of both splits, with normalised images on ``device``.

    Training begins at ``first_step``, counted over all epochs. Its batches are those that loaders built with 0 give at
    that step, on any number of ranks. At most ``cores`` threads decode. For synthetic data, ``root`` is not read.

    Raises:
        UserError: If the images cannot be trained on, or not with this batch.
    """
    split = _split(data, root, "train")
    order = TrainSampler(split.images, batching, rank, seed, first_step)
    if not order.steps_per_epoch:
        raise UserError(
            f"the training set has {order.images} images, fewer than one global batch of {batching.global_batch}; "
            f"--set global_batch={order.images} or less, or give more images"
        )
    validation = build_val_loader(data, root, batching, rank, cores, device, seed, dtype, channels_last)
    loader = open_loader(data, split.source, order, cores, device, seed)
    mix = None
    if isinstance(data, ImageData) and (data.mixup or data.cutmix):
        mix = Mixer(seed, validation.classes, data.mixup, data.cutmix)
    train = _finished(loader, Normalizer(data, device, dtype, channels_last), mix)
    found = contents(validation.class_names, contents_of_split(split.images, split.source), validation.val_contents)
    return Loaders(**vars(validation), contents=found, train_order=order, train=train)


def build_val_loader(
    data: Data, root: Path | None, batching: Batching, rank: int, cores: int, device: torch.device, seed: int,
    dtype: torch.dtype = torch.float32, channels_last: bool = True,
) -> ValLoader:  # fmt: skip
    """Build this rank's loader of the validation split, as ``build_loaders`` does; there need be no training split.

    Raises:
        UserError: If the images cannot be evaluated on.
    """
    split = _split(data, root, "val")
    order = EvalSampler(split.images, batching.micro_batch, batching.ranks, rank)
    loader = open_loader(data, split.source, order, cores, device, seed)
    val = _finished(loader, Normalizer(data, device, dtype, channels_last))
    return ValLoader(split.classes, split.class_names, contents_of_split(split.images, split.source), order, val)


class _Split(NamedTuple):
    """A split's number of images, and the images themselves unless they are synthetic; its classes with their names."""

    images: int
    source: ImageSource | None
    classes: int
    class_names: list[str]


def _split(data: Data, root: Path | None, split: SplitName) -> _Split:
    match data:
        case SyntheticData():
            return _Split(data.train_images if split == "train" else data.val_images, None, data.classes, [])
        case ImageData():
            assert root is not None
            source = open_training(root) if split == "train" else open_validation(root)
            return _Split(len(source), source, len(source.classes), source.classes)
        case _:
            assert_never(data)


def _finished(
    loader: Iterable[Batch], normalise: Normalizer, mix: Mixer | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of ``loader`` as a network reads them: images and labels."""
    for images, labels, indices in loader:
        yield (normalise(images), labels) if mix is None else mix(normalise(images), labels, indices)


def open_loader(
    data: Data, images: ImageSource | None, order: Order, cores: int, device: torch.device, seed: int
) -> Iterator[Batch]:
    """Build the loader that ``data`` describes; its batches hold bytes, not normalised.

    At most ``cores`` threads decode. Synthetic data takes its images from ``seed``, and None for ``images``.
    """
    match data:
        case SyntheticData():
            return synthetic_images(order, data, device, seed)
        case ImageData():
            assert images is not None
            threads = min(data.workers or cores, cores)
            load: type[DaliLoader | ThreadLoader | PixelLoader]
            load = DaliLoader if data.loader == "dali" else ThreadLoader
            if device.type == "cuda" and isinstance(images, Shards) and resizable(images.pixel_sides).mean() > 0.5:
                load = PixelLoader
            return _resident_or_read(images, order, data, device, load(images, order, data, device, threads))
        case _:
            assert_never(data)


def _resident_or_read(
    images: ImageSource, order: Order, data: ImageData, device: torch.device, reading: Iterable[Batch]
) -> Iterator[Batch]:
    """Yield the batches of images that live on the device, or else those that are read."""
    if (resident := resident_on(device, images, data)) is not None:
        reading = PixelLoader(images, order, data, device, 1, resident)
    yield from reading


def example_images(data: Data, root: Path | None, seed: int) -> Iterator[Tensor]:
    """Yield 5000 normalised training images, not augmented, from which a model can compute initial weights.

    They are fp32 [n, 3, S, S] on the CPU, chosen by ``seed`` alone: the same for any loader and any number of ranks.
    """
    split, cpu = _split(data, root, "train"), torch.device("cpu")
    if isinstance(data, ImageData):
        data = data.model_copy(update={"augment": False, "loader": "threads", "resident": False})
    batch = min(split.images, _EXAMPLES_AT_ONCE)
    order = TrainSampler(split.images, Batching(1, batch, 1), 0, seed)
    batches = min(_EXAMPLES // batch, order.steps_per_epoch)
    loader = open_loader(data, split.source, order, 1, cpu, seed)
    normalise = Normalizer(data, cpu, torch.float32)
    yield from (normalise(images) for images, _, _ in islice(loader, batches))


def synthetic_images(order: Order, data: SyntheticData, device: torch.device, seed: int) -> Iterator[Batch]:
    """Yield batches of random images in ``order``, as loaders do. Image i has label i mod classes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_BANK, data.image_size, data.image_size, 3)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device).permute(0, 3, 1, 2)
    for indices in order:
        chosen = torch.from_numpy(indices.images).to(device, non_blocking=True)
        yield Batch(images[chosen % _BANK], chosen % data.classes, indices)
