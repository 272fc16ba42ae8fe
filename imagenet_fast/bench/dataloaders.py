"""Measure how fast our loaders, others and decoding alone provide training batches, without training.

All provide uint8 images [n, 3, S, S] in memory, ours on the device; normalising is the same for all. In every round,
each loader is opened, timed and closed in turn, so that none works while another is timed. The first batches of a turn
are not timed, because they may have been prefetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, assert_never

import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

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
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.forks import end_with_starter, start_fork_server
from imagenet_fast.netlab.timing import in_turns
from imagenet_fast.progress import measurement_bar
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import SyntheticData

_SEED = 1
_HELD = 1024
"""Number of encoded images kept in memory and decoded repeatedly."""

Loader = Literal["synthetic", "folder", "pixels", "dali", "dali-bare", "torchvision-pil", "torchvision-io", "decoding"]


@dataclass(frozen=True)
class LoadingRate(Row):
    """Throughput of a loader on one rank: medians over the rounds, and extremes."""

    loader: Loader = field(metadata=column("loader"))
    """The loader."""
    images: str
    """The images that were read."""
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

    If DALI is not installed, its loaders are left out with a warning.

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
        UserError: ``resize`` is given for images in ``root``, there are fewer images than a batch needs, or no loader
            is left.
    """
    if root is not None and root.is_dir() and find_split(root, "train").shards:
        raise UserError(f"--data {root} holds shards, and bench data reads class folders; give such a directory")
    if root is not None and resize is not None:
        raise UserError(f"--resize shrinks the photos that are made here; run `data prepare --resize` on {root} first")
    chosen = [loader for loader in loaders if dali.is_installed() or not loader.startswith("dali")]
    if not chosen:
        raise UserError(f"--loaders {','.join(loaders)} needs DALI; `pip install nvidia-dali-cuda130`, or name others")
    if len(chosen) < len(loaders):
        warn("DALI's loaders are left out, since it is not installed; `pip install nvidia-dali-cuda130`")
    device, _ = prepare_device(0)
    with ExitStack() as folders:
        if root is None:
            folder, about = folders.enter_context(made_photos(2 * batch, resize))
            about += f", {resize} pixels on the shorter side" if resize is not None else ""
        else:
            folder, about = root, f"images in {root}"
        stored = Path(folders.enter_context(TemporaryDirectory(prefix="imagenet-fast-")))
        if "pixels" in chosen:
            side = max(256, image_size * 8 // 7)
            settings = Settings(format="pixels", resize=side, quality=None, shard_size=2**30)
            prepare(folder, stored, settings, subset=True)

        def timed(loader: Loader) -> tuple[float, float]:
            source = stored if loader == "pixels" else folder
            return measure(_open(loader, source, image_size, batch, workers, device), batch, seconds, device)

        with measurement_bar() as show:
            measured = in_turns(chosen, rounds, timed, show)

    def row(loader: Loader) -> LoadingRate:
        rates, by_core = zip(*measured[loader], strict=True)
        return LoadingRate(
            loader, about, image_size, batch, workers, median(rates), min(rates), max(rates), median(by_core)
        )

    return list(map(row, measured))


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
            return _bare_dali(folder, image_size, batch, workers, device)
        case "torchvision-pil" | "torchvision-io":
            return _torchvision(folder, image_size, batch, workers, by_pillow=loader == "torchvision-pil")
        case "decoding":
            return _decoding(folder, batch, workers)
        case _:
            assert_never(loader)


def _decoding(root: Path, batch: int, workers: int) -> Iterator[None]:
    """Decode the first images whole, from memory, endlessly: no loader that decodes whole images can be faster."""
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


def _torchvision(root: Path, image_size: int, batch: int, workers: int, by_pillow: bool) -> Iterator[Any]:
    """Yield endless random batches as torchvision's classification reference makes them, up to uint8 tensors.

    ``by_pillow``: Pillow decodes and crops; otherwise torchvision's own decoder and tensor transforms do.
    """
    crop_and_flip = [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
    if by_pillow:
        images = ImageFolder(root / "train", v2.Compose([*crop_and_flip, v2.PILToTensor()]))
    else:
        read = partial(decode_image, mode=ImageReadMode.RGB)
        images = ImageFolder(root / "train", v2.Compose(crop_and_flip), loader=read)
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


def _bare_dali(root: Path, image_size: int, batch: int, workers: int, device: torch.device) -> Iterator[None]:
    """Run a pipeline of DALI's own reader, crop and flip, endlessly; its batches stay in DALI's memory."""
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
    while True:
        pipeline.run()
        yield
