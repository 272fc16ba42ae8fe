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
    for split, names in zip(("train", "val"), _both_splits(root), strict=True):
        _check_classes(root / split, names)


def check_validation(root: Path) -> None:
    """Raise UserError where :func:`scan_validation` would, without listing every image."""
    names, _ = _validation_split(root)
    _check_classes(root / "val", names)


def scan(root: Path) -> tuple[ImageFolder, ImageFolder]:
    """List the training and the validation split under ``root``.

    Raises UserError where a folder is missing, a class has no images, or val has a class that train lacks.
    """
    return scan_training(root), scan_validation(root)


def scan_training(root: Path) -> ImageFolder:
    """List the training split. Raises UserError as :func:`scan` does."""
    train, _ = _both_splits(root)
    return _list(root / "train", train, train)


def scan_validation(root: Path) -> ImageFolder:
    """List the validation split; where there is no other its classes are its own. Raises UserError as :func:`scan`."""
    names, classes = _validation_split(root)
    return _list(root / "val", names, classes)


def _validation_split(root: Path) -> tuple[list[str], list[str]]:
    """Its class folders, and the classes that number them."""
    if (root / "train").is_dir():
        classes, names = _both_splits(root)
        return names, classes
    names = _class_names(root, "val")
    return names, names


def _both_splits(root: Path) -> tuple[list[str], list[str]]:
    train, val = (_class_names(root, split) for split in ("train", "val"))
    strangers = sorted(set(val) - set(train))
    if strangers:
        raise UserError(
            f"{root / 'val'} has {len(strangers)} class(es) that train lacks, the first '{strangers[0]}'; "
            "class folders must have the same names in both"
        )
    return train, val


def _class_names(root: Path, split: str) -> list[str]:
    if not root.is_dir():
        raise UserError(f"there is no data directory {root}; give one with --data DIR")
    if not (root / split).is_dir():
        raise UserError(f"{root} has no folder {split}; it must hold train/<class>/* and val/<class>/*")
    names = sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir())
    if not names:
        raise UserError(f"{root / split} has no class folders; it must hold one folder of images a class")
    return names


def _check_classes(folder: Path, names: list[str]) -> None:
    for name in names:
        with os.scandir(folder / name) as entries:
            _require(any(_is_image(e) for e in entries), folder / name)


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
