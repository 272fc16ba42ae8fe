"""Small data sets: made, damaged, and opened by any loader."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagenet_fast.data.build import Loaders, build_loaders
from imagenet_fast.data.folders import ImageFolder, scan_split
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData, SyntheticData
from imagenet_fast.recipe.load import parse_recipe
from tests.conftest import tables
from tests.data.encoded import BAD, JPEG

LOADERS = ("dali", "threads")
"""Of images; with ``synthetic`` these are all."""
FORMATS = ("folder", "webdataset")
CPU = torch.device("cpu")
ALONE = Batching(ranks=1, micro_batch=8, accumulation=1)
SYNTHETIC = SyntheticData(loader="synthetic", image_size=8, train_images=40, val_images=7, classes=3)
WHOLE = Settings(format="folder", resize=None, quality=None)
"""``data prepare`` without shrinking images."""


def image_data(loader: str = "threads", **changes: object) -> ImageData:
    table = {"dataset": "digits", "loader": loader, "image_size": 48, "resize": 56, "workers": 1, **changes}
    data = parse_recipe("test", tables(data=table)).data
    assert isinstance(data, ImageData)
    return data


def opened(
    root: Path | None, data: str | ImageData | SyntheticData, batching: Batching = ALONE, rank: int = 0,
    seed: int = 1, first_step: int = 0, **changes: object,
) -> Loaders:  # fmt: skip
    """The loaders of one rank; ``data`` is a loader's name, which ``changes`` are for."""
    settings = image_data(data, **changes) if isinstance(data, str) else data
    return build_loaders(settings, root, batching, rank, 2, CPU, seed, first_step)


def scan(root: Path) -> tuple[ImageFolder, ImageFolder]:
    """Both splits in class folders."""
    return scan_split(root, "train"), scan_split(root, "val")


def collect(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """So many batches' images."""
    return torch.cat([images for images, _ in islice(batches, count)])


def same(ours: Iterable[Sequence[Tensor]], theirs: Iterable[Sequence[Tensor]]) -> bool:
    """Whether these are as many batches of the same images and labels, to the bit."""
    pairs = zip_longest(ours, theirs, fillvalue=())
    return all(len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)) for ours, theirs in pairs)


def put(folder: Path, *names: str, content: bytes = JPEG) -> Path:
    """The same image under these names, whatever they are, in folders made for them; ``folder``."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def put_classes(root: Path, *classes: str, train: int = 1, val: int = 1) -> Path:
    """Folders of so many images, 0.jpg and so on, in both splits."""
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            put(root / split / name, *(f"{number}.jpg" for number in range(count)))
    return root


def one_class(root: Path, contents: dict[str, bytes]) -> Path:
    """These images, in both splits."""
    for split in ("train", "val"):
        for name, content in contents.items():
            put(root / split / "all", f"{name}.jpg", content=content)
    return root


def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty of noise for those of scikit-learn, whose import takes longer than all else about them."""
    images = np.random.default_rng(0).integers(0, 17, (40, 8, 8)).astype(float)
    digits = SimpleNamespace(images=images, target=np.arange(40) % 10)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=lambda: digits))


def with_bad_images(image_dir: Path, root: Path) -> Path:
    """40 images to train on, of which 10 are bad in another way each, and 7 to validate, of which one is."""
    shutil.copytree(image_dir, root)
    for path, content in zip(sorted((root / "train").glob("*/*"))[::4], BAD.values(), strict=True):
        path.write_bytes(content)
    (root / "val" / "class1" / "004.jpg").write_bytes(BAD["half a jpeg"])
    return root


def as_format(root: Path, format: str, out: Path, shard_size: int = 30_000) -> Path:
    """The folders ``root``, or shards of them in ``out``."""
    if format == "folder":
        return root
    prepare(root, out, WHOLE.model_copy(update={"format": "webdataset", "shard_size": shard_size}), subset=True)
    return out


# What becomes of a file.

Damage = Callable[[Path], Any]


def cut(at: int) -> Damage:
    """All from byte ``at`` on is lost; from the end if it is negative."""
    return lambda path: os.truncate(path, path.stat().st_size + at if at < 0 else at)


def overwritten(at: int, content: bytes) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def replaced(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)
