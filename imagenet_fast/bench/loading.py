"""How fast each loader gives batches, with nothing that trains beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, assert_never, get_args

import numpy as np
import torch
from PIL import Image
from rich.table import Table

from imagenet_fast.data.dataset import open_dataset
from imagenet_fast.errors import UserError
from imagenet_fast.ranks.world import prepare_device
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Data, ImageData, SyntheticData
from imagenet_fast.record.tables import compact_table, number

Loader = Literal["synthetic", "folder", "dali"]

_WARM_BATCHES = 4
_SIDES = (375, 500)  # of most photos in ImageNet


@dataclass(frozen=True)
class LoadingRate:
    """What one rank gets from a loader. None where it is not installed."""

    loader: Loader
    images_per_s: float | None


def parse_loaders(text: str) -> list[Loader]:
    """Their names, comma-separated. Raises UserError."""
    names: tuple[Loader, ...] = get_args(Loader)
    chosen = [name for wanted in text.split(",") for name in names if name == wanted]
    if len(chosen) < len(text.split(",")):
        raise UserError(f"--loaders {text}: a loader is one of {', '.join(names)}; write them with commas between")
    return chosen


def bench_loading(
    loaders: Sequence[Loader], root: Path | None, image_size: int, batch: int, workers: int, seconds: float
) -> list[LoadingRate]:
    """Take training batches of each loader for about ``seconds``, to this machine's GPU if it has one.

    Pictures are those under ``root``, or photos made up for the occasion.
    """
    device, _ = prepare_device(0)
    with _pictures(root, 2 * batch) as folder:
        return [
            _measure(loader, _data(loader, image_size, batch, workers), folder, batch, seconds, device)
            for loader in loaders
        ]


def loading_table(rates: list[LoadingRate]) -> Table:
    """One row a loader."""
    return compact_table(
        ("loader", ""),
        ("img/s",),
        ((r.loader, "" if r.images_per_s else "is not installed", number(r.images_per_s, ".0f")) for r in rates),
    )


def make_photos(root: Path, count: int) -> None:
    """``count`` JPEGs to train on and one to validate, in one class, of an ImageNet photo's usual size.

    Noise whose amplitude falls with its frequency, as in photographs, so that a decoder has about as much to do.
    """
    random = np.random.default_rng(0)
    for index in range(count + 1):
        folder = root / ("train" if index < count else "val") / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        _photo(random).save(folder / f"{index:05}.jpg", quality=90)


def _photo(random: np.random.Generator) -> Image.Image:
    height, width = _SIDES
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(random.standard_normal((3, height, width))) / frequency
    pixels = np.fft.irfft2(spectrum, (height, width))
    pixels *= 50 / pixels.std()
    return Image.fromarray((pixels.transpose(1, 2, 0) + 128).clip(0, 255).astype(np.uint8))


@contextmanager
def _pictures(root: Path | None, count: int) -> Iterator[Path]:
    if root is not None:
        yield root
        return
    with TemporaryDirectory() as folder:
        make_photos(Path(folder), count)
        yield Path(folder)


def _data(loader: Loader, image_size: int, batch: int, workers: int) -> Data:
    match loader:
        case "synthetic":
            return SyntheticData(
                loader="synthetic", image_size=image_size, train_images=2 * batch, val_images=1, classes=1000
            )
        case "folder" | "dali":
            return ImageData(
                dataset="imagenet", loader=loader, image_size=image_size, resize=image_size * 8 // 7, workers=workers
            )
        case _:
            assert_never(loader)


def _measure(loader: Loader, data: Data, folder: Path, batch: int, seconds: float, device: torch.device) -> LoadingRate:
    if loader == "dali" and not _has_dali():
        return LoadingRate(loader, None)
    batches = open_dataset(data, folder, Batching(1, batch, 1), 0, 1, device, seed=1).train
    for _ in range(_WARM_BATCHES):
        _wait_for(batches, device)
    waits: list[float] = []
    while sum(waits) < seconds:
        waits.append(_wait_for(batches, device))
    return LoadingRate(loader, batch * len(waits) / sum(waits))


def _has_dali() -> bool:
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        return False
    return True


def _wait_for(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> float:
    """Seconds until the next batch lies on the device."""
    begun = time.perf_counter()
    next(batches)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
