"""Time the roads of images to a GPU: what stored pixels cost the host, and on a GPU, how many images a second come.

    python -m experiments.loaders [--batch 128] [--seconds 5]

The host's figures are CPU time of the one thread that fills a batch, by the road to the GPU (`PixelLoader`) and by the
CPU's (`ThreadLoader`), some batches in turn, into memory that was used before, as pinned memory is. On a GPU follow the
batches of `PixelLoader` that are read and resident, how long the GPU takes to resize one, and JPEGs by DALI, by the
share of its hardware decoder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from imagenet_fast.data import loader, pixel_loader
from imagenet_fast.data.dali import DaliLoader, is_installed
from imagenet_fast.data.loader import Job, ThreadLoader
from imagenet_fast.data.order import BatchIndices, TrainSampler
from imagenet_fast.data.pixel_loader import PixelLoader, resident_on
from imagenet_fast.data.source import ImageSource
from imagenet_fast.data.throughput import images_to_time, measure, stored_pixels
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import DaliDecoding, ImageData

IMAGES = 512
SIZES = (224, 88)
BLOCK = 12
"""Batches of a road before it is the other's turn."""
CPU = torch.device("cpu")


def main() -> None:
    """Make photos, store their pixels, and print a line for each road."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128, help="Images of a batch.")
    parser.add_argument("--seconds", type=float, default=5, help="Seconds for each road.")
    options = parser.parse_args()
    with images_to_time(None, IMAGES // 2, side=256) as (photos, about, folder):
        images = stored_pixels(photos, IMAGES, 224, folder)
        print(f"{about}, 256 pixels on the shorter side, {options.batch} a batch")
        for size in SIZES:
            data = ImageData(
                dataset="imagenet", loader="threads", image_size=size, resize=size * 8 // 7, on_bad_image="skip"
            )
            order = TrainSampler(len(images), Batching(1, options.batch, 1), 0, seed=1)
            on_the_host(images, order, data, options.seconds)
            if torch.cuda.is_available():
                on_a_gpu(images, order, data, options.seconds)
    if torch.cuda.is_available() and is_installed():
        by_dali(options.batch, options.seconds)


def on_the_host(images: ImageSource, order: TrainSampler, data: ImageData, seconds: float) -> None:
    """Print the CPU time of a thread that fills a batch by either road, medians of batches in turn."""
    kept: dict[torch.dtype, Tensor] = {}

    def used_before(shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
        count = int(np.prod(shape))
        if dtype not in kept or len(kept[dtype]) < count:
            kept[dtype] = torch.zeros(2 * count, dtype=dtype)
        return kept[dtype][:count].view(*shape)

    begins: dict[str, Callable[[BatchIndices], tuple[object, Iterable[Job]]]] = {
        load.__name__: load(images, order, data, CPU, 1)._begin for load in (PixelLoader, ThreadLoader)
    }
    spent: dict[str, list[float]] = {name: [] for name in begins}
    batches, end = iter(order), time.perf_counter() + seconds
    with patch.object(pixel_loader, "empty", used_before), patch.object(loader, "empty", used_before):
        while time.perf_counter() < end:
            some = list(islice(batches, BLOCK))
            for name, begin in begins.items():
                for number, indices in enumerate(some):
                    start = time.thread_time()
                    for job in begin(indices)[1]:
                        for _ in job:
                            pass
                    if number:  # the first one finds what the other road left in the caches
                        spent[name].append((time.thread_time() - start) / len(indices.images))
    for name, each in spent.items():
        print(f"to {data.image_size} pixels, host, {name}: {1e6 * median(each):.1f} us an image ({len(each)} batches)")


def on_a_gpu(images: ImageSource, order: TrainSampler, data: ImageData, seconds: float) -> None:
    """Print the images a second that are read, and resident, and the GPU's time to resize a batch."""
    device, batch = torch.device("cuda", 0), order.batching.micro_batch
    resident = resident_on(device, images, data.model_copy(update={"resident": True}))
    for name, on_device in (("read", None), ("resident", resident)):
        load: Callable[[int], Iterator[object]] = partial(_batches, images, order, data, device, on_device)
        for threads in (1, 2, 4):
            rate, of_core = measure(load(threads), batch, seconds / 6, device, threads)
            print(f"to {data.image_size} pixels, {name}, {threads} threads: {rate:.0f} images/s, {of_core:.0f} a core")
    there = PixelLoader(images, order, data, device, 1)
    tiles, jobs = there._begin(next(iter(order)))
    for job in jobs:
        list(job)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        there._resized(tiles, device)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    print(f"to {data.image_size} pixels: {median(times):.2f} ms for the GPU to resize a batch")


def by_dali(batch: int, seconds: float) -> None:
    """Print the JPEGs a second that DALI decodes, by the share of its hardware decoder and with either upsampling."""
    device, order = torch.device("cuda", 0), TrainSampler(2 * batch, Batching(1, batch, 1), 0, seed=1)
    with images_to_time(None, batch) as (photos, about, _):
        print(about)
        for load, fancy in product((0.5, 0.65, 0.8), (True, False)):
            data = ImageData(
                dataset="imagenet", loader="dali", image_size=224, resize=256,
                dali=DaliDecoding(hw_decoder_load=load, fancy_upsampling=fancy),
            )  # fmt: skip
            rate, of_core = measure(iter(DaliLoader(photos, order, data, device, 8)), batch, seconds / 6, device, 8)
            print(f"dali, load {load}, fancy upsampling {fancy}: {rate:.0f} images/s, {of_core:.0f} a core")


def _batches(
    images: ImageSource, order: TrainSampler, data: ImageData, device: torch.device,
    resident: pixel_loader.Resident | None, threads: int,
) -> Iterator[object]:  # fmt: skip
    return iter(PixelLoader(images, order, data, device, threads, resident))


if __name__ == "__main__":
    main()
