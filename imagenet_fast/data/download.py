"""Fetch the data sets that need no account, as one folder per class: CIFAR-10, and the digits of ``paths``.

CIFAR-10 comes from its authors' host, or from their archive on disk, as torchvision leaves it.
"""

from __future__ import annotations

import hashlib
import pickle
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.data.paths import cache_dir, make_digits
from imagenet_fast.data.progress import progress_bars
from imagenet_fast.data.source import check_folders
from imagenet_fast.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES = 60_000
ARCHIVE = "cifar-10-python.tar.gz"
HOST = "https://www.cs.toronto.edu/~kriz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
_TIMEOUT_S = 20.0  # timeout for a host that does not answer, as behind a firewall
_PART = 2**18  # bytes to read at a time
_BATCHES = (*(("train", f"data_batch_{number}") for number in range(1, 6)), ("val", "test_batch"))

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
    with tempfile.TemporaryDirectory() as temporary:
        if archive is None:
            archive = _download(Path(temporary))
        _verify(archive)
        with tarfile.open(archive) as opened:
            write_cifar10(place, _batches(opened))


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


def _download(folder: Path) -> Path:
    """Download the archive into ``folder``."""
    url = f"{HOST}/{ARCHIVE}"
    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer,
            (folder / ARCHIVE).open("wb") as file,
            progress_bars("bytes") as bar,
        ):
            length = answer.headers.get("Content-Length")
            task = bar.add_task("downloading", total=int(length) if length is not None else None)
            while part := answer.read(_PART):
                file.write(part)
                bar.advance(task, len(part))
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"{url} cannot be fetched ({reason}); try again, or fetch it elsewhere and give --archive FILE"
        ) from None
    return folder / ARCHIVE


def _verify(archive: Path) -> None:
    """Raise UserError unless the archive is there and has the published SHA-256."""
    if not archive.is_file():
        raise UserError(f"there is no archive {archive}; give the path of {ARCHIVE}")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"{archive} is not {ARCHIVE}: its sha256 is {found}, not {SHA256}; fetch it again")


def _batches(archive: tarfile.TarFile) -> Iterator[Batch]:
    """Yield the batches of an archive: labels, and the red, green and blue planes of each image, row by row."""
    for split, batch in _BATCHES:
        file = archive.extractfile(f"cifar-10-batches-py/{batch}")
        assert file is not None
        table = pickle.loads(file.read(), encoding="bytes")  # nothing else has its checksum
        planes = table[b"data"].reshape(-1, 3, 32, 32)
        yield split, table[b"labels"], np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
