"""Measure how fast our loaders, others and decoding alone provide training batches, without training.

All provide uint8 images [n, 3, S, S] in memory, ours on the device; normalising is the same for all. In every round,
each loader is opened, timed and closed in turn, so that none works while another is timed. The first batches of a turn
are not timed, because they may have been prefetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, assert_never

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from imagenet_fast.data import dali
from imagenet_fast.data.folders import ImageFolder
from imagenet_fast.data.loader import Job, prefetched
from imagenet_fast.data.pixels import ImageDecodeError, decode, kind_of
from imagenet_fast.data.source import ImageSource
from imagenet_fast.data.throughput import images_to_time, measure, stored_pixels, training_batches
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.forks import end_with_starter, start_fork_server
from imagenet_fast.netlab.timing import in_turns
from imagenet_fast.progress import measurement_bar

_SEED = 1
_HELD = 1024
"""Number of encoded images kept in memory and decoded repeatedly."""

Loader = Literal["threads", "pixels", "dali", "dali-bare", "torchvision-pil", "torchvision-io", "decoding"]


@dataclass(frozen=True)
class LoadingRate(Row):
    """Throughput of a loader on one rank: medians over the rounds, and extremes."""

    loader: Loader = field(metadata=column("loader"))
    """The loader."""
    images: str
    """The images that were read."""
    reads: str = field(metadata=column("reads"))
    """Their format, with the median width and height in pixels of the first ones, as they are stored."""
    image_size: int
    """Side of the crops, in pixels."""
    batch: int
    """Images of a batch."""
    workers: int
    """Decoding threads."""
    images_per_s: float = field(metadata=column("img/s", form=".0f"))
    """Images a second, the median of the rounds."""
    slowest: float = field(metadata=column("slowest", form=".0f"))
    """Images a second in the slowest round."""
    fastest: float = field(metadata=column("fastest", form=".0f"))
    """Images a second in the fastest round."""
    images_per_core_s: float = field(metadata=column("img/s per core", form=".0f"))
    """Images per second of CPU time, summed over all threads and processes."""

    @property
    def title(self) -> str:
        """Describe the images and what is made of them."""
        return f"{self.images}; to {self.image_size} pixels, {self.batch} a batch, {self.workers} workers"


def bench_loading(
    loaders: Sequence[Loader], root: Path | None, image_size: int, batch: int, workers: int, seconds: float,
    rounds: int = 1, resize: int | None = None,
) -> list[LoadingRate]:  # fmt: skip
    """Time training batches of each loader, on this node's GPU if it has one.

    A loader that cannot be timed here, or not on these images, is left out with a warning.

    They read the images in ``root``, in any format, or temporary photos made here, shrunk to a shorter side of
    ``resize`` pixels as by `data prepare --resize`. ``workers`` are threads, or processes if a loader uses these. Each
    loader is timed for about ``seconds`` in each round.

    Raises:
        UserError: ``resize`` is given with ``root``, there are fewer images than a batch, or no loader is left.
    """
    if root is not None and resize is not None:
        raise UserError(f"--resize shrinks the photos that are made here; run `data prepare --resize` on {root} first")
    device, _ = prepare_device(0)
    with images_to_time(root, batch, resize) as (images, about, folder):
        decoded = (described := _described(images)).startswith("ppm")
        about = f"decoded {about}" if decoded else about
        chosen = _possible(loaders, images, decoded)
        sources = dict.fromkeys(chosen, images)
        if "pixels" in chosen:
            sources["pixels"] = stored_pixels(images, 2 * batch, image_size, folder)
        reads = {loader: described if of is images else _described(of) for loader, of in sources.items()}

        def timed(loader: Loader) -> tuple[float, float]:
            batches = _open(loader, sources[loader], image_size, batch, workers, device)
            return measure(batches, batch, seconds, device, workers)

        with measurement_bar() as show:
            measured = in_turns(chosen, rounds, timed, show)

    def row(loader: Loader) -> LoadingRate:
        rates, by_core = zip(*measured[loader], strict=True)
        speeds = median(rates), min(rates), max(rates), median(by_core)
        return LoadingRate(loader, about, reads[loader], image_size, batch, workers, *speeds)

    return list(map(row, measured))


def _described(images: ImageSource) -> str:
    """Return the format of the first 16 images and their median width and height, such as ``jpg, 500 x 375``."""
    sizes, kind = [], ""
    for index in range(min(len(images), 16)):
        with suppress(ImageDecodeError):
            encoded = images.read(index)
            sizes.append(decode(encoded).shape[1::-1])
            kind = kind_of(encoded)
    width, height = map(int, np.median(sizes or [(0, 0)], axis=0))
    return f"{kind}, {width} x {height}"


def _possible(loaders: Sequence[Loader], images: ImageSource, decoded: bool) -> list[Loader]:
    """Return the loaders that can be timed on ``images``, and warn of the others. Raises UserError if there is none."""
    why: dict[Loader, str] = {}
    if not dali.is_installed():
        why |= dict.fromkeys(("dali", "dali-bare"), "DALI is not installed (`pip install nvidia-dali-cuda130`)")
    if not isinstance(images, ImageFolder):
        why |= dict.fromkeys(("dali-bare", "torchvision-pil", "torchvision-io"), "it reads class folders, not shards")
    if decoded:
        why |= dict.fromkeys(("pixels", "decoding"), "the images are decoded already, and so 'threads' reads them")
    possible = [loader for loader in loaders if loader not in why]
    if not possible:
        raise UserError(f"--loaders {','.join(loaders)} cannot be timed: {why[loaders[0]]}; name others")
    for loader in loaders:
        if loader in why:
            warn(f"{loader} is left out: {why[loader]}")
    return possible


def _open(
    loader: Loader, images: ImageSource, image_size: int, batch: int, workers: int, device: torch.device
) -> Iterator[Any]:
    """Return an iterator over the batches of ``loader``."""
    match loader:
        case "threads" | "dali" | "pixels":
            return training_batches(loader, images, image_size, batch, workers, device)
        case "dali-bare":
            return _bare_dali(images, image_size, batch, workers, device)
        case "torchvision-pil" | "torchvision-io":
            assert isinstance(images, ImageFolder)
            return _torchvision(images.folder, image_size, batch, workers, by_pillow=loader == "torchvision-pil")
        case "decoding":
            return _decoding(images, batch, workers)
        case _:
            assert_never(loader)


def _decoding(images: ImageSource, batch: int, workers: int) -> Iterator[None]:
    """Decode the first images whole, from memory, endlessly: no loader that decodes whole images can be faster."""
    held = [images.read(index) for index in range(min(len(images), _HELD))]

    def decode_every(offset: int, share: int) -> Job:
        for number in range(offset, offset + share):
            try:
                decode(held[number % len(held)])
            except ImageDecodeError as error:
                raise UserError(
                    f"{images.name(number % len(held))} cannot be decoded ({error}); run `imagenet-fast data verify`, "
                    "after which such images are left out"
                ) from None
            yield

    def batches() -> Iterator[tuple[None, list[Job]]]:
        done, share = 0, -(-batch // workers)
        while True:
            parts = range(0, batch, share)
            yield None, [decode_every(done + part, min(share, batch - part)) for part in parts]
            done += batch

    return prefetched(batches(), workers, depth=2)


def _torchvision(folder: Path, image_size: int, batch: int, workers: int, by_pillow: bool) -> Iterator[Any]:
    """Yield endless random batches as torchvision's classification reference makes them, up to uint8 tensors.

    ``by_pillow``: Pillow decodes and crops; otherwise torchvision's own decoder and tensor transforms do.
    """
    crop_and_flip = [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
    if by_pillow:
        images = datasets.ImageFolder(folder, v2.Compose([*crop_and_flip, v2.PILToTensor()]))
    else:
        read = partial(decode_image, mode=ImageReadMode.RGB)
        images = datasets.ImageFolder(folder, v2.Compose(crop_and_flip), loader=read)
    start_fork_server(__name__)
    order = RandomSampler(images, replacement=True, num_samples=2**40, generator=torch.Generator().manual_seed(_SEED))
    batches: DataLoader[Any] = DataLoader(
        images, batch, sampler=order, num_workers=workers, multiprocessing_context="forkserver",
        worker_init_fn=end_with_starter,
    )  # fmt: skip
    try:
        yield from batches
    except Exception as error:
        raise UserError(
            f"torchvision cannot read an image ({str(error).strip().splitlines()[-1]}); `imagenet-fast data verify` "
            "finds such files; take them away to measure"
        ) from None


def _bare_dali(images: ImageSource, image_size: int, batch: int, workers: int, device: torch.device) -> Iterator[None]:
    """Run a pipeline of DALI's own reader, crop and flip, endlessly; its batches stay in DALI's memory."""
    from nvidia.dali import Pipeline, fn, types

    gpu = device.type == "cuda"
    pipeline = Pipeline(batch, workers, device.index if gpu else None, prefetch_queue_depth=2, seed=_SEED)
    with pipeline:
        files = [images.name(index) for index in range(len(images))]
        encoded, labels = fn.readers.file(files=files, labels=images.labels.tolist(), random_shuffle=True)
        crops = fn.decoders.image_random_crop(
            encoded, device="mixed" if gpu else "cpu", output_type=types.RGB, adjust_orientation=False,
            random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3],
        )  # fmt: skip
        crops = fn.resize(crops, size=[image_size, image_size], interp_type=types.INTERP_TRIANGULAR)
        pipeline.set_outputs(fn.flip(crops, horizontal=fn.random.coin_flip()), labels)
    pipeline.build()
    while True:
        pipeline.run()
        yield
