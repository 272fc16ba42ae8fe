"""Pictures in one folder a class: ``train/<class>/*`` and ``val/<class>/*``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@dataclass(frozen=True)
class ImageFolder:
    """One split. ``labels`` [images] are indices into the sorted class names of the training split."""

    paths: list[str]
    labels: NDArray[np.int64]
    classes: list[str]

    def __len__(self) -> int:
        return len(self.paths)


def check_folders(root: Path) -> None:
    """Raise UserError where :func:`scan` would, without listing every image."""
    for split, names in zip(("train", "val"), _class_names(root), strict=True):
        for name in names:
            with os.scandir(root / split / name) as entries:
                _require(any(_is_image(e) for e in entries), root / split / name)


def scan(root: Path) -> tuple[ImageFolder, ImageFolder]:
    """List the training and the validation split under ``root``.

    Raises UserError where a folder is missing, a class has no images, or val has a class that train lacks.
    """
    train, val = _class_names(root)
    return _list(root / "train", train, train), _list(root / "val", val, train)


def _class_names(root: Path) -> tuple[list[str], list[str]]:
    if not root.is_dir():
        raise UserError(f"there is no data directory {root}; give one with --data DIR")
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise UserError(f"{root} has no folder {split}; it must hold train/<class>/* and val/<class>/*")
    train, val = (sorted(e.name for e in os.scandir(root / s) if e.is_dir()) for s in ("train", "val"))
    for split, names in (("train", train), ("val", val)):
        if not names:
            raise UserError(f"{root / split} has no class folders; it must hold one folder of images a class")
    strangers = sorted(set(val) - set(train))
    if strangers:
        raise UserError(
            f"{root / 'val'} has {len(strangers)} class(es) that train lacks, the first '{strangers[0]}'; "
            "class folders must have the same names in both"
        )
    return train, val


def _list(folder: Path, names: list[str], classes: list[str]) -> ImageFolder:
    number = {name: label for label, name in enumerate(classes)}
    paths: list[str] = []
    labels: list[int] = []
    for name in names:
        found = sorted(e.path for e in os.scandir(folder / name) if _is_image(e))
        _require(bool(found), folder / name)
        paths += found
        labels += [number[name]] * len(found)
    return ImageFolder(paths, np.asarray(labels, dtype=np.int64), classes)


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES)


def _require(has_images: bool, folder: Path) -> None:
    if not has_images:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}); add some, or remove the folder")
