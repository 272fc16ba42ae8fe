"""Measure how fast our loaders, others and decoding alone provide training batches, without training.

All provide uint8 images [n, 3, S, S] in memory, ours on the device; normalising is the same for all. In every round,
each loader is opened, timed and closed in turn. So all are measured under the same noise, and none works while another
is timed. The first batches of a turn are not timed, because they may have been prefetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, assert_never, get_args

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from imagenet_fast.bench.forks import end_with_starter, start_fork_server
from imagenet_fast.bench.progress import measurement_bar
from imagenet_fast.data import dali
from imagenet_fast.data.build import open_loader
from imagenet_fast.data.folders import scan_split
from imagenet_fast.data.loader import Job, prefetched
from imagenet_fast.data.order import TrainSampler
from imagenet_fast.data.pixels import ImageDecodeError, decode
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.data.source import find_split, open_training
from imagenet_fast.data.throughput import made_photos, measure, training_batches
from imagenet_fast.distributed.init import prepare_device
from imagenet_fast.errors import UserError, listed
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import SyntheticData

_SEED = 1
_HELD = 1024
"""Number of encoded images kept in memory and decoded repeatedly."""

Loader = Literal["synthetic", "folder", "pixels", "dali", "dali-bare", "torchvision-pil", "torchvision-io", "decoding"]


@dataclass(frozen=True)
class LoadingRate:
    """Throughput of a loader on one rank: medians over the rounds, and extremes.

    Rates are None if the loader is not installed.
    """

    loader: Loader
    """The loader."""
    images: str
    """The images that were read."""
    image_size: int
    """Side of the crops, in pixels."""
    batch: int
    """Images of a batch."""
    workers: int
    """Decoding threads."""
    images_per_s: float | None
    """Images a second, the median of the rounds; None if the loader is not installed."""
    slowest: float | None
    """Images a second in the slowest round."""
    fastest: float | None
    """Images a second in the fastest round."""
    images_per_core_s: float | None
    """Images per second of CPU time, summed over all threads and processes."""


def parse_loaders(text: str) -> list[Loader]:
    """Parse a comma-separated list of different loaders.

    Raises:
        UserError: A name is unknown.
    """

    def loader(name: str) -> Loader:
        names: tuple[Loader, ...] = get_args(Loader)
        if name not in names:
            raise UserError(f"--loaders {text}: a loader is one of {', '.join(names)}; write them with commas between")
        return name

    return listed("--loaders", text, loader)


def bench_loading(
    loaders: Sequence[Loader],
    root: Path | None,
    image_size: int,
    batch: int,
    workers: int,
    seconds: float,
    rounds: int = 1,
    resize: int | None = None,
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
        resize: Shorter side of the photos in pixels, as `data prepare --resize` leaves them; None: 375.

    Raises:
        UserError: ``resize`` is given for images in ``root``, or there are fewer images than a batch needs.
    """
    if root is not None and root.is_dir() and find_split(root, "train").shards:
        raise UserError(f"--data {root} holds shards, and bench data reads class folders; give such a directory")
    if root is not None and resize is not None:
        raise UserError(f"--resize shrinks the photos that are made here; run `data prepare --resize` on {root} first")
    device, _ = prepare_device(0)
    turns: dict[Loader, list[tuple[float, float]]] = {loader: [] for loader in loaders}
    parts = rounds * len(loaders)
    with (
        _images(root, 2 * batch, resize) as (folder, about),
        _pixels(folder, image_size, "pixels" in loaders) as stored,
        measurement_bar() as show,
    ):
        for turn in range(rounds):
            for number, loader in enumerate(loaders if turn % 2 == 0 else reversed(loaders)):
                show(f"{loader}, round {turn + 1} of {rounds}", turn * len(loaders) + number, parts)
                if loader.startswith("dali") and not dali.is_installed():
                    continue
                batches = _open(loader, stored if loader == "pixels" else folder, image_size, batch, workers, device)
                turns[loader].append(measure(batches, batch, seconds, device))
                del batches  # its threads end now
    return [_rate(loader, turns[loader], about, image_size, batch, workers) for loader in loaders]


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
def _images(root: Path | None, count: int, resize: int | None) -> Iterator[tuple[Path, str]]:
    """Yield the directory of the images, and a description of them; make ``count`` photos if ``root`` is None."""
    if root is not None:
        yield root, f"images in {root}"
        return
    with made_photos(count, resize) as (folder, about):
        yield folder, about + (f", {resize} pixels on the shorter side" if resize is not None else "")


@contextmanager
def _pixels(folder: Path, image_size: int, needed: bool) -> Iterator[Path]:
    """Yield a directory with the images of ``folder``, if needed, as `data prepare --format pixels` writes them."""
    with TemporaryDirectory(prefix="imagenet-fast-") as stored:
        if needed:
            side = max(256, image_size * 8 // 7)
            settings = Settings(format="pixels", resize=side, quality=None, shard_size=2**30)
            prepare(folder, Path(stored), settings, subset=True)
        yield Path(stored)


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
            return open_loader(made_up, None, order, 1, device, seed=1)
        case "folder" | "dali" | "pixels":
            images = open_training(folder)
            if len(images) < batch:
                raise UserError(f"{folder} holds {len(images)} images, fewer than a batch; --batch {len(images)}")
            return training_batches(
                "dali" if loader == "dali" else "folder", images, image_size, batch, workers, device
            )
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


def decoding(root: Path, batch: int, workers: int) -> Iterator[None]:
    """Decode the first images under ``root`` whole, from memory: no loader that decodes whole images can be faster.

    Args:
        root: Directory of the images.
        batch: Images decoded for each item.
        workers: Number of threads.

    Returns:
        An endless iterator; an item stands for one decoded batch.
    """
    images = scan_split(root, "train")
    held = [images.read(index) for index in range(min(len(images), _HELD))]

    def decode_every(offset: int, share: int) -> Job:
        for number in range(offset, offset + share):
            try:
                decode(held[number % len(held)])
            except ImageDecodeError as error:
                raise UserError(
                    f"{images.name(number % len(held))} cannot be decoded ({error}); `imagenet-fast data verify` "
                    "finds such files; take them away to measure"
                ) from None
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
    source = scan_split(root, "train")
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
    return _named_faults(batches)


def _named_faults(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield ``batches``; a worker's error becomes a sentence without its traceback."""
    try:
        yield from batches
    except Exception as error:
        raise UserError(
            f"torchvision cannot read an image ({str(error).strip().splitlines()[-1]}); `imagenet-fast data verify` "
            "finds such files; take them away to measure"
        ) from None


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
