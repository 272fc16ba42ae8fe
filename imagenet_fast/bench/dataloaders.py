"""Measure how fast our loaders, others and decoding alone provide training batches, without training.

All provide uint8 images [n, 3, S, S] in memory, ours on the device; normalising is the same for all. In every round,
each loader is opened, timed and closed in turn. So all are measured under the same noise, and none works while another
is timed. The first batches of a turn are not timed, because they may have been prefetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, assert_never, get_args

import torch
from rich.table import Table

from imagenet_fast.bench.dataloader_baselines import bare_dali, decoding, torchvision_io, torchvision_pil
from imagenet_fast.data import dali_loader
from imagenet_fast.data.imagefolder import scan_training
from imagenet_fast.data.loaders import open_loader
from imagenet_fast.data.sample_images import make_photos
from imagenet_fast.data.sampler import TrainSampler
from imagenet_fast.data.throughput import fastest, measure, training_batches
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import SyntheticData

Loader = Literal["synthetic", "folder", "dali", "dali-bare", "torchvision-pil", "torchvision-io", "decoding"]


@dataclass(frozen=True)
class LoadingRate:
    """Throughput of a loader on one rank: medians over the rounds, and extremes.

    Rates are None if the loader is not installed.
    """

    loader: Loader
    images: str
    image_size: int
    batch: int
    workers: int
    images_per_s: float | None
    slowest: float | None
    fastest: float | None
    images_per_core_s: float | None
    """Images per second of CPU time, summed over all threads and processes."""


def parse_loaders(text: str) -> list[Loader]:
    """Parse a comma-separated list of loaders.

    Raises:
        UserError: A name is unknown.
    """
    names: tuple[Loader, ...] = get_args(Loader)
    chosen = [name for wanted in text.split(",") for name in names if name == wanted]
    if len(chosen) < len(text.split(",")):
        raise UserError(f"--loaders {text}: a loader is one of {', '.join(names)}; write them with commas between")
    return chosen


def bench_loading(
    loaders: Sequence[Loader],
    root: Path | None,
    image_size: int,
    batch: int,
    workers: int,
    seconds: float,
    rounds: int = 1,
) -> list[LoadingRate]:
    """Time training batches of each loader, on this node's GPU if it has one.

    Args:
        loaders: The loaders to time.
        root: Directory of the images; None means temporary photos made here.
        image_size: Side of the images in pixels.
        batch: Images per batch.
        workers: Number of threads, or of processes if the loader uses these.
        seconds: Time for each loader in each round, approximately.
        rounds: Number of rounds.

    Raises:
        UserError: There are fewer images than a batch needs.
    """
    device, _ = prepare_device(0)
    turns: dict[Loader, list[tuple[float, float]]] = {loader: [] for loader in loaders}
    with _images(root, 2 * batch) as (folder, about):
        for turn in range(rounds):
            for loader in loaders if turn % 2 == 0 else reversed(loaders):
                if loader.startswith("dali") and not dali_loader.is_installed():
                    continue
                batches = _open(loader, folder, image_size, batch, workers, device)
                turns[loader].append(measure(batches, batch, seconds, device))
    return [_rate(loader, turns[loader], about, image_size, batch, workers) for loader in loaders]


def loading_table(rates: list[LoadingRate]) -> Table:
    """Build a table with one row per loader; the caption reports which of our loaders is fastest."""
    table = compact_table(
        ("loader", ""),
        ("img/s", "slowest", "fastest", "img/s a core"),
        (
            (
                r.loader, "" if r.images_per_s else "is not installed",
                *(number(n, ".0f") for n in (r.images_per_s, r.slowest, r.fastest, r.images_per_core_s)),
            )
            for r in rates
        ),
    )  # fmt: skip
    table.title = _title(rates)
    table.caption = fastest({rate.loader: rate.images_per_s for rate in rates}) or None
    table.caption_justify = "left"
    return table


def draw_loading(rates: Sequence[LoadingRate], figure: Any) -> None:
    """Draw one bar per loader, with an error bar from its slowest to its fastest round."""
    axes = figure.subplots()
    there = [rate for rate in reversed(rates) if rate.images_per_s]
    typical = [rate.images_per_s or 0.0 for rate in there]
    below = [(rate.images_per_s or 0.0) - (rate.slowest or 0.0) for rate in there]
    above = [(rate.fastest or 0.0) - (rate.images_per_s or 0.0) for rate in there]
    colours = ["tab:blue" if rate.loader in ("folder", "dali") else "tab:gray" for rate in there]
    bars = axes.barh([rate.loader for rate in there], typical, xerr=(below, above), color=colours, ecolor="black")
    axes.bar_label(bars, [f"{rate:.0f}" for rate in typical], label_type="center", color="white")
    axes.set(xlabel="images a second", title=_title(rates))
    axes.spines[["top", "right"]].set_visible(False)


def _title(rates: Sequence[LoadingRate]) -> str:
    first = rates[0]
    return f"{first.images}; to {first.image_size} pixels, {first.batch} a batch, {first.workers} workers"


def _rate(
    loader: Loader, turns: list[tuple[float, float]], about: str, image_size: int, batch: int, workers: int
) -> LoadingRate:
    """Summarise the rounds of one loader; ``turns`` holds images per second, and per second of CPU time."""
    if not turns:
        return LoadingRate(loader, about, image_size, batch, workers, None, None, None, None)
    rates, by_core = zip(*turns, strict=True)
    return LoadingRate(
        loader, about, image_size, batch, workers, median(rates), min(rates), max(rates), median(by_core)
    )


@contextmanager
def _images(root: Path | None, count: int) -> Iterator[tuple[Path, str]]:
    """Yield the directory of the images, and a description of them; make ``count`` photos if ``root`` is None."""
    if root is not None:
        yield root, f"images in {root}"
        return
    with TemporaryDirectory() as folder:
        yield Path(folder), make_photos(Path(folder), count)


def _open(
    loader: Loader, folder: Path, image_size: int, batch: int, workers: int, device: torch.device
) -> Iterator[Any]:
    """Return an iterator over the batches of ``loader``."""
    match loader:
        case "synthetic":
            order = TrainSampler(2 * batch, Batching(1, batch, 1), 0, seed=1)
            made_up = SyntheticData(
                loader="synthetic", image_size=image_size, train_images=2 * batch, val_images=1, classes=1000
            )
            return iter(open_loader(made_up, None, order, 1, device, seed=1))
        case "folder" | "dali":
            images = scan_training(folder)
            if len(images) < batch:
                raise UserError(f"{folder} holds {len(images)} images, fewer than a batch; --batch {len(images)}")
            return training_batches(loader, images, image_size, batch, workers, device)
        case "dali-bare":
            return bare_dali(folder, image_size, batch, workers, device)
        case "torchvision-pil":
            return torchvision_pil(folder, image_size, batch, workers)
        case "torchvision-io":
            return torchvision_io(folder, image_size, batch, workers)
        case "decoding":
            return decoding(folder, batch, workers)
        case _:
            assert_never(loader)
