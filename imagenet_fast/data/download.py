"""Fetch the data sets that need no account, as one folder per class: CIFAR-10, and the digits of ``paths``.

torchvision fetches CIFAR-10 from its authors' host, or reads their archive on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.data.paths import cache_dir, make_digits
from imagenet_fast.data.source import check_folders
from imagenet_fast.errors import UserError
from imagenet_fast.progress import progress_bars

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES = 60_000

Batch = tuple[str, list[int], NDArray[np.uint8]]
"""Name of the split, labels, and images uint8 [n, 32, 32, 3]."""


def fetch_dataset(name: Literal["cifar10", "digits"], out: Path | None, archive: Path | None) -> Path:
    """Fetch the data set ``name``, unless it is already there, and return its directory.

    It is ``out``, or one in the cache directory; CIFAR-10 comes from its ``archive``, or is downloaded.

    Raises:
        UserError: Something else lies in the data set's place, or it cannot be fetched.
    """
    classes = CLASSES if name == "cifar10" else tuple(map(str, range(10)))
    if archive is not None and name != "cifar10":
        raise UserError(f"--archive {archive} is for cifar10; the {name} are made here, so leave it out")
    place = out or cache_dir() / name
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        for split in ("train", "val"):
            if sorted(path.name for path in (place / split).glob("*/")) != sorted(classes):
                raise UserError(f"{place} holds something else than {name}; choose another --out, or remove it")
        check_folders(place)
    elif name == "digits":
        make_digits(place)
    else:
        fetch_cifar10(place, archive)
    return place


def fetch_cifar10(place: Path, archive: Path | None) -> None:
    """Write CIFAR-10 to ``place``, which is created only if everything succeeds; None for ``archive``: download it.

    Raises UserError if there is no archive, or its checksum is not the published one.
    """
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    with tempfile.TemporaryDirectory() as temporary:
        if archive is not None:
            if not check_integrity(archive, CIFAR10.tgz_md5):
                raise UserError(
                    f"{archive} is not there, or not {CIFAR10.filename} as its authors give it; fetch it again"
                )
            Path(temporary, CIFAR10.filename).symlink_to(archive.absolute())
        try:
            train, val = (CIFAR10(temporary, train, download=True) for train in (True, False))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{CIFAR10.url} cannot be fetched ({error}); try again, or fetch it elsewhere and give --archive FILE"
            ) from None
        write_cifar10(place, [("train", train.targets, train.data), ("val", val.targets, val.data)])


def write_cifar10(place: Path, batches: Iterable[Batch]) -> None:
    """Write ``batches`` of CIFAR-10 to the new directory ``place``, as one folder of PNGs a class."""
    with atomic_directory(place) as folder, progress_bars("images") as bar:
        task = bar.add_task("unpacking", total=IMAGES)
        done = {"train": 0, "val": 0}
        for split, labels, images in batches:
            for label, pixels in zip(labels, images, strict=True):
                target = folder / split / CLASSES[label] / f"{done[split]:05}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(target, compress_level=1)
                done[split] += 1
                bar.advance(task)
