"""Measure how fast a loader gives training batches, without training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import psutil
import torch
from PIL import Image

from imagenet_fast.data.build import open_loader
from imagenet_fast.data.device import Batch
from imagenet_fast.data.loader import THREADS
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.data.prepare.write import SHRUNK_QUALITY, shrunk
from imagenet_fast.data.source import ImageSource
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData

OwnLoader = Literal["folder", "dali"]
"""Name of one of our loaders of images on a disk."""

_WARM_BATCHES = 6
"""Batches taken before the measurement: more than any loader has ready before the first is asked for."""

_WIDTH, _HEIGHT = 500, 375
_WIDEST = 560
"""Largest width in pixels of a part cut from a photo, which is 640 wide."""

_QUALITIES = (90, 96)


def training_batches(
    loader: OwnLoader, images: ImageSource, image_size: int, batch: int, threads: int, device: torch.device
) -> Iterator[Batch]:
    """Return an iterator over training batches for a single rank, in bytes; there must be ``batch`` images."""
    data = ImageData(
        dataset="imagenet", loader=loader, image_size=image_size, resize=image_size * 8 // 7, workers=threads,
        on_bad_image="skip",
    )  # fmt: skip
    order = TrainSampler(len(images), Batching(1, batch, 1), 0, seed=1)
    return open_loader(data, images, order, threads, device, seed=1)


def measure(batches: Iterator[Any], batch: int, seconds: float, device: torch.device) -> tuple[float, float]:
    """Return images per second, and per second of CPU time, of ``batches`` for about ``seconds``.

    The first batches are not counted, and ``device`` is synchronised after each.
    """
    for _ in range(_WARM_BATCHES):
        next(batches)
    _settle(device)
    taken, spent, begun = 0, _processor_s(), time.perf_counter()
    while not taken or time.perf_counter() - begun < seconds:
        next(batches)
        _settle(device)
        taken += batch
    return taken / (time.perf_counter() - begun), taken / (_processor_s() - spent)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor_s() -> float:
    """Return the CPU seconds used so far by this process and the processes it has started."""
    others = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in others)


@contextmanager
def made_photos(count: int, side: int | None = None) -> Iterator[tuple[Path, str]]:
    """Make photos as ``make_photos`` does in a temporary directory; yield it, and what they are made of.

    The loaders that read them must have been given up at exit, which waits for their threads: one that still read would
    warn of images that are gone.
    """
    with TemporaryDirectory(prefix="imagenet-fast-") as folder:
        yield Path(folder), make_photos(Path(folder), count, side)
        for thread in threading.enumerate():
            if thread.name.startswith(THREADS):
                thread.join()


def make_photos(root: Path, count: int, side: int | None = None) -> str:
    """Write ``count`` JPEGs to train on and one to validate, in one class, and return what they are made of.

    They are parts of scikit-learn's two photos (china.jpg and flower.jpg, 640x427), in turn. A part is 4:3, 400 to 560
    wide and from a random position; half of the parts are mirrored. It is resized to 500x375 with Lanczos and saved
    with a quality from 90 to 96; with ``side``, it is then shrunk as `data prepare --resize` does.

    Without scikit-learn they are noise whose amplitude falls with its frequency, as in photographs. So a decoder has
    about as much work.
    """
    random = np.random.default_rng(0)
    theirs = _theirs()
    made = _cut(theirs, random) if theirs else _noise(random)
    for index in range(count + 1):
        folder = root / ("train" if index < count else "val") / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        quality = int(random.integers(_QUALITIES[0], _QUALITIES[1] + 1))
        file = folder / f"{index:05}.jpg"
        next(made).save(file, quality=quality)
        if side is not None:
            file.write_bytes(shrunk(file.read_bytes(), side, SHRUNK_QUALITY))
    return "parts of scikit-learn's two photos" if theirs else "noise, for scikit-learn's photos are not installed"


def _theirs() -> list[Image.Image]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        return []
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def _cut(photos: list[Image.Image], random: np.random.Generator) -> Iterator[Image.Image]:
    while True:
        for photo in photos:
            width = int(random.integers(400, _WIDEST + 1))
            height = width * _HEIGHT // _WIDTH
            left, top = random.integers(0, (photo.width - width + 1, photo.height - height + 1)).tolist()
            part = photo.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS, (left, top, left + width, top + height))
            yield part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.integers(2) else part


def _noise(random: np.random.Generator) -> Iterator[Image.Image]:
    frequency = np.hypot(np.fft.fftfreq(_HEIGHT)[:, None], np.fft.rfftfreq(_WIDTH)[None])
    frequency[0, 0] = 1.0
    while True:
        spectrum = np.fft.rfft2(random.standard_normal((3, _HEIGHT, _WIDTH))) / frequency
        pixels = np.fft.irfft2(spectrum, (_HEIGHT, _WIDTH))
        pixels *= 50 / pixels.std()
        yield Image.fromarray((pixels.transpose(1, 2, 0) + 128).clip(0, 255).astype(np.uint8))
