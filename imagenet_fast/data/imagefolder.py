"""Images in one folder a class: ``train/<class>/*`` and ``val/<class>/*``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.formats import index_cache
from imagenet_fast.data.formats.index_cache import Fingerprint, Index, Kind, check_kept, load_or_build_index, moving
from imagenet_fast.data.image_names import (
    SUFFIXES,
    FolderContents,
    images_below,
    is_class_name,
    is_image_name,
    look_into,
    shown,
)
from imagenet_fast.data.image_source import digest_of
from imagenet_fast.errors import UserError, warn

_KIND = Kind("folder", {"names": "|u1", "ends": "<i8", "folders": "<i8"})
_THREADS = 16  # that wait for a file server


@dataclass(frozen=True)
class ImageFolder:
    """One split. ``labels`` [images] are indices into the sorted class names of the training split.

    File names lie one after another in ``names``, each up to its element of ``ends`` [images]: a million strings take
    several times the memory.
    """

    folder: Path
    names: bytes
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: list[str]

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        """What a person is told where image ``index`` is bad: its path."""
        begin = self.ends[index - 1] if index else 0
        file = os.fsdecode(self.names[begin : self.ends[index]])
        return os.path.join(self.folder, self.classes[self.labels[index]], file)  # noqa: PTH118  (pathlib is slow)

    def read(self, index: int) -> bytes:
        """Image ``index``, still encoded."""
        with open(self.name(index), "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()

    def digest(self) -> str:
        """Of the names and labels of all images."""
        return digest_of(self.names, self.ends, self.labels)

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Nothing: to open the files would be to wait for the server as often as reading them does."""


def check_folders(root: Path) -> None:
    """Raise UserError where :func:`scan` would, without listing every image."""
    for split, names in zip(("train", "val"), _both_splits(root), strict=True):
        _check_classes(root, split, names)


def check_validation(root: Path) -> None:
    """Raise UserError where :func:`scan_validation` would, without listing every image."""
    names, _ = _validation_split(root)
    _check_classes(root, "val", names)


def scan(root: Path) -> tuple[ImageFolder, ImageFolder]:
    """The training and the validation split under ``root``, listed once and then remembered until a folder changes.

    Raises UserError where a folder is missing, a class has no images, or val has a class that train lacks.
    """
    return scan_training(root), scan_validation(root)


def scan_training(root: Path) -> ImageFolder:
    """The training split. Raises UserError as :func:`scan` does."""
    train, _ = _both_splits(root)
    return _open(root, "train", train, train)


def scan_validation(root: Path) -> ImageFolder:
    """The validation split; where there is no other its classes are its own. Raises UserError as :func:`scan`."""
    names, classes = _validation_split(root)
    return _open(root, "val", names, classes)


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
        raise UserError(
            f"{root} has no folder {split}; it must hold train/<class>/* and val/<class>/*, or shards of both"
        )
    with os.scandir(root / split) as entries:
        names = sorted(entry.name for entry in entries if is_class_name(entry.name) and entry.is_dir())
    if not names:
        raise UserError(f"{root / split} has no class folders; it must hold one folder of images a class")
    return names


def _check_classes(root: Path, split: str, names: list[str]) -> None:
    folder = root / split
    for name in names:
        with os.scandir(folder / name) as entries:
            found = any(is_image_name(entry.name) for entry in entries)
        if not found:
            require_images(folder / name, look_into(folder / name))

    def fault(kept: Index) -> str:
        """The index counts as many entries of each folder as there are, which is sooner found out than their names."""
        if [stamp[0] for stamp in kept.about["stamps"]] != names:
            return ""
        with ThreadPoolExecutor(_THREADS) as threads:
            there = threads.map(lambda name: len(os.listdir(folder / name)), names)  # noqa: PTH208  (names alone)
            for name, before, now in zip(names, kept.about["entries"], there, strict=True):
                if before != now:
                    return f"is of {before} files in {shown(name)}, where there are {now}"
        return ""

    check_kept(root, split, _KIND, fault)


def _open(root: Path, split: str, names: list[str], classes: list[str]) -> ImageFolder:
    folder = root / split

    def stamp() -> Fingerprint:
        """A folder's times change with its names."""
        return [index_cache.stamp_of(name, (folder / name).stat()) for name in names]

    index = load_or_build_index(root, split, _KIND, stamp, lambda: _list(folder, names))
    if os.environ.get("RANK", "0") == "0":
        _tell_left_out(folder, index.about)
    kept = index.columns
    number = {name: label for label, name in enumerate(classes)}
    numbers = np.asarray([number[name] for name in names], dtype=np.int64)
    return ImageFolder(folder, kept["names"].tobytes(), kept["ends"], numbers[kept["folders"]], classes)


def _list(folder: Path, names: list[str]) -> Index:
    """All images, by the number of their folder in ``names``; and how many files are left out that may be meant."""
    found: list[FolderContents] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, contents in zip(names, threads.map(lambda name: look_into(folder / name), names), strict=True):
            moving()
            require_images(folder / name, contents)
            found.append(contents)
    files = [os.fsencode(file) for contents in found for file in contents.images]
    columns: dict[str, NDArray[Any]] = {
        "names": np.frombuffer(b"".join(files), np.uint8),
        "ends": np.cumsum([len(file) for file in files], dtype=np.int64),
        "folders": np.repeat(np.arange(len(names)), [len(contents.images) for contents in found]),
    }
    by_name = list(zip(names, found, strict=True))
    unread = [os.path.join(name, file) for name, contents in by_name for file in contents.unread]  # noqa: PTH118
    apart = look_into(folder).images + _deeper(folder, by_name)
    entries = [contents.entries for contents in found]
    return Index({"apart": _some(apart), "unread": _some(unread), "entries": entries}, columns)


def deeper_images(folder: Path, contents: FolderContents, within: str = "") -> list[str]:
    """Images in folders inside the ``folder`` of a class, which holds ``contents``, by paths that begin with
    ``within``."""
    inside = ((folder / name, os.path.join(within, name)) for name in contents.folders)  # noqa: PTH118
    return list(chain.from_iterable(images_below(*place) for place in inside))


def _deeper(folder: Path, by_name: list[tuple[str, FolderContents]]) -> list[str]:
    return list(chain.from_iterable(deeper_images(folder / name, contents, name) for name, contents in by_name))


def _some(paths: list[str]) -> list[Any]:
    """How many they are, and one of them."""
    return [len(paths), shown(min(paths))] if paths else []


def _tell_left_out(folder: Path, about: Mapping[str, Any]) -> None:
    """Warn of files that are not trained on, though somebody may think so."""
    if apart := about.get("apart"):
        warn(
            f"{folder}: {apart[0]} images lie in no class's own folder, as {apart[1]}, and are left out; move them "
            "into the folder of their class"
        )
    if unread := about.get("unread"):
        warn(
            f"{folder}: {unread[0]} files are of kinds that are not read, as {unread[1]}, and are left out; convert "
            "them, or take them away"
        )


def require_images(folder: Path, contents: FolderContents) -> None:
    """Raise UserError where the ``folder`` of a class has no images among its ``contents``."""
    if contents.images:
        return
    advice = "add some, or remove the folder"
    if deeper := deeper_images(folder, contents):
        advice = f"{len(deeper)} lie in folders inside it, as {shown(min(deeper))}; move them up into {folder}"
    raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}); {advice}")
