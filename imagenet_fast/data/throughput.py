"""Measure how fast a loader gives training batches, without training, and what images it is measured on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import psutil
import torch
from PIL import Image, ImageOps

from imagenet_fast.data import pixels
from imagenet_fast.data.build import open_loader
from imagenet_fast.data.device import Batch
from imagenet_fast.data.index import map_in_order
from imagenet_fast.data.loader import THREADS
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.data.prepare.write import SHRUNK_QUALITY, Sample, shrunk_jpeg, write_tar
from imagenet_fast.data.source import ImageSource, open_training
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData

OwnLoader = Literal["threads", "pixels", "dali"]
"""Name of one of our loaders of images on a disk; ``pixels`` is ``threads`` on decoded images."""

WARM_BATCHES = 6
"""Batches taken before a measurement: more than our loaders and DALI have ready before the first is asked for."""


def training_batches(
    loader: OwnLoader, images: ImageSource, image_size: int, batch: int, threads: int, device: torch.device
) -> Iterator[Batch]:
    """Return an iterator over training batches for a single rank, in bytes; there must be ``batch`` images."""
    data = ImageData(
        dataset="imagenet", loader="threads" if loader == "pixels" else loader, image_size=image_size,
        resize=image_size * 8 // 7, workers=threads, on_bad_image="skip", resident=False,
    )  # fmt: skip
    order = TrainSampler(len(images), Batching(1, batch, 1), 0, seed=1)
    return open_loader(data, images, order, threads, device, seed=1)


def measure(
    batches: Iterator[Any], batch: int, seconds: float, device: torch.device, workers: int
) -> tuple[float, float]:
    """Return images per second, and per second of CPU time, of ``batches`` for about ``seconds``.

    The first are not counted: torch's DataLoader has two per worker ready. ``device`` is synchronised after each.
    """
    settle = torch.get_device_module(device).synchronize
    for _ in range(max(WARM_BATCHES, 2 * workers + 2)):
        next(batches)
    settle()
    taken, spent, begun = 0, _processor_s(), time.perf_counter()
    while not taken or time.perf_counter() - begun < seconds:
        next(batches)
        settle()
        taken += batch
    return taken / (time.perf_counter() - begun), taken / (_processor_s() - spent)


def _processor_s() -> float:
    """Return the CPU seconds used so far by this process and the processes it has started."""
    others = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in others)


@contextmanager
def images_to_time(given: Path | None, batch: int, side: int | None = None) -> Iterator[tuple[ImageSource, str, Path]]:
    """Yield images to measure loaders on, what they are, and a temporary directory.

    They are the training images in ``given``, at least a batch, or two batches of ``make_photos``. Loaders must have
    been given up at exit, which waits for their threads: one that still read would warn of images that are gone.
    """
    with TemporaryDirectory(prefix="imagenet-fast-") as folder:
        about = make_photos(Path(folder), 2 * batch, side) if given is None else f"images in {given}"
        images = open_training(given or Path(folder))
        if len(images) < batch:
            raise UserError(f"{given} holds {len(images)} images, fewer than a batch; --batch {len(images)}")
        yield images, about, Path(folder)
        for thread in threading.enumerate():
            if thread.name.startswith(THREADS):
                thread.join()


def stored_pixels(images: ImageSource, count: int, image_size: int, folder: Path) -> ImageSource:
    """Store the first ``count`` images as `data prepare --format pixels` does, shrunk for crops, and open them."""

    def stored(index: int) -> Sample:
        content = b""
        with suppress(pixels.ImageDecodeError):  # loaders pass over what cannot be decoded
            content = images.read(index)
            content = pixels.store_pixels(pixels.shrunk(pixels.decode(content), max(256, image_size * 8 // 7)))
        return Sample("", content, 0)

    (folder / "pixels").mkdir()
    write_tar(folder / "pixels/train-0.tar", enumerate(map_in_order(stored, range(min(count, len(images))))))
    return open_training(folder / "pixels")


def make_photos(root: Path, count: int, side: int | None = None) -> str:
    """Write ``count`` JPEGs to train on and one to validate, in one class, and return what they are made of.

    They are parts of scikit-learn's two photos (china.jpg and flower.jpg, 640x427), in turn. A part is 4:3, 400 to 560
    wide and from a random position; half of the parts are mirrored. It is resized to 500x375 with Lanczos and saved
    with a quality from 90 to 96; with ``side``, it is then shrunk as `data prepare --resize` does. Without scikit-learn
    they are parts of noise whose amplitude falls with its frequency, as in photographs.
    """
    random = np.random.default_rng(0)
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        photos, told = [_noise(random)], "noise, for scikit-learn's photos are not installed"
    else:
        photos, told = list(map(Image.fromarray, load_sample_images().images)), "parts of scikit-learn's two photos"
    for index in range(count + 1):
        folder = root / ("train" if index < count else "val") / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        photo, (quality, width) = photos[index % len(photos)], random.integers((90, 400), (97, 561)).tolist()
        left, top = random.integers(0, (photo.width - width + 1, photo.height - width * 3 // 4 + 1)).tolist()
        part = photo.resize((500, 375), Image.Resampling.LANCZOS, (left, top, left + width, top + width * 3 // 4))
        file = folder / f"{index:05}.jpg"
        (ImageOps.mirror(part) if random.integers(2) else part).save(file, quality=quality)
        if side is not None:
            file.write_bytes(shrunk_jpeg(file.read_bytes(), side, SHRUNK_QUALITY))
    return told


def _noise(random: np.random.Generator) -> Image.Image:
    height, width = 427, 640
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(random.standard_normal((3, height, width))) / frequency
    values = np.fft.irfft2(spectrum, (height, width))
    values *= 50 / values.std()
    return Image.fromarray((values.transpose(1, 2, 0) + 128).clip(0, 255).astype(np.uint8))
