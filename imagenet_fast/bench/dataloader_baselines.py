"""Provide baseline loaders of uint8 training batches: torchvision's, a minimal DALI pipeline, and decoding alone.

No loader that decodes whole images can be faster than decoding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from imagenet_fast.data.decode import decode
from imagenet_fast.data.imagefolder import scan_training
from imagenet_fast.data.prefetch import Job, prefetched
from imagenet_fast.distributed.forkserver import end_with_starter, start_fork_server

_SEED = 1
_HELD = 1024
"""Number of encoded images kept in memory and decoded repeatedly."""


def decoding(root: Path, batch: int, workers: int) -> Iterator[None]:
    """Decode the first images under ``root`` whole, from memory.

    Args:
        root: Directory of the images.
        batch: Images decoded for each item.
        workers: Number of threads.

    Returns:
        An endless iterator; an item stands for one decoded batch.
    """
    images = scan_training(root)
    held = [images.read(index) for index in range(min(len(images), _HELD))]

    def decode_every(offset: int, share: int) -> Job:
        for number in range(share):
            decode(held[(offset + number) % len(held)])
            yield

    def batches() -> Iterator[tuple[None, list[Job]]]:
        done, share = 0, -(-batch // workers)
        while True:
            parts = range(0, batch, share)
            yield None, [decode_every(done + part, min(share, batch - part)) for part in parts]
            done += batch

    return prefetched(batches(), workers, depth=2)


def torchvision_pil(root: Path, image_size: int, batch: int, workers: int) -> Iterator[Any]:
    """Load batches as torchvision's classification reference does, up to uint8 tensors.

    Args:
        root: Directory of the images.
        image_size: Side of the cropped images in pixels.
        batch: Images per batch.
        workers: Number of worker processes.
    """
    transform = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return _torchvision(ImageFolder(root / "train", v2.Compose(transform)), batch, workers)


def torchvision_io(root: Path, image_size: int, batch: int, workers: int) -> Iterator[Any]:
    """Load batches as ``torchvision_pil`` does, but with torchvision's own decoder and tensor transforms."""
    transform = [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
    return _torchvision(ImageFolder(root / "train", v2.Compose(transform), loader=_decoded), batch, workers)


def bare_dali(root: Path, image_size: int, batch: int, workers: int, device: torch.device) -> Iterator[None]:
    """Run a pipeline of DALI's own reader, crop and flip; its batches stay in DALI's memory.

    Args:
        root: Directory of the images.
        image_size: Side of the cropped images in pixels.
        batch: Images per batch.
        workers: Number of threads.
        device: A GPU, or the CPU.

    Raises:
        ImportError: DALI is not installed.
    """
    from nvidia.dali import Pipeline, fn, types

    gpu = device.type == "cuda"
    source = scan_training(root)
    pipeline = Pipeline(batch, workers, device.index if gpu else None, prefetch_queue_depth=2, seed=_SEED)
    with pipeline:
        files = [source.name(index) for index in range(len(source))]
        encoded, labels = fn.readers.file(files=files, labels=source.labels.tolist(), random_shuffle=True)
        images = fn.decoders.image_random_crop(
            encoded, device="mixed" if gpu else "cpu", output_type=types.RGB, adjust_orientation=False,
            random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3],
        )  # fmt: skip
        images = fn.resize(images, size=[image_size, image_size], interp_type=types.INTERP_TRIANGULAR)
        pipeline.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), labels)
    pipeline.build()

    def run() -> Iterator[None]:
        while True:
            pipeline.run()
            yield

    return run()


def _torchvision(images: ImageFolder, batch: int, workers: int) -> Iterator[Any]:
    """Return endless random batches from a ``DataLoader`` with ``workers`` processes."""
    start_fork_server(__name__)
    batches: DataLoader[Any] = DataLoader(
        images,
        batch_sampler=_Endless(len(images), batch),
        num_workers=workers,
        multiprocessing_context="forkserver",
        worker_init_fn=_end_with_starter,
    )
    return iter(batches)


class _Endless:
    """An endless batch sampler of random indices."""

    def __init__(self, images: int, batch: int) -> None:
        self._images = images
        self._batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(_SEED)
        while True:
            yield torch.randint(self._images, (self._batch,), generator=generator).tolist()


def _decoded(path: str) -> torch.Tensor:
    pixels: torch.Tensor = decode_image(path, ImageReadMode.RGB)
    return pixels


def _end_with_starter(worker: int) -> None:
    end_with_starter()
