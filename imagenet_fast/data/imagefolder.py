"""Read images from one folder per class: ``train/<class>/*`` and ``val/<class>/*``."""

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
    class_folders,
    images_below,
    is_image_name,
    look_into,
    read_file,
    shown,
)
from imagenet_fast.data.image_source import digest_of
from imagenet_fast.errors import UserError, warn

_KIND = Kind("folder", {"names": "|u1", "ends": "<i8", "folders": "<i8"})
_THREADS = 16  # they mostly wait for a file server


@dataclass(frozen=True)
class ImageFolder:
    """One split in class folders.

    ``labels`` [images] are indices into the sorted class names of the training split. ``names`` holds all file names
    without separators; each ends at its element of ``ends`` [images]. A million strings would take several times the
    memory.
    """

    folder: Path
    names: bytes
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: list[str]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.ends)

    def name(self, index: int) -> str:
        """Return the path of image ``index``."""
        begin = self.ends[index - 1] if index else 0
        file = os.fsdecode(self.names[begin : self.ends[index]])
        return os.path.join(self.folder, self.classes[self.labels[index]], file)  # noqa: PTH118  (pathlib is slow)

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image ``index``."""
        return read_file(self.name(index))

    def digest(self) -> str:
        """Return a digest of the names and labels of all images."""
        return digest_of(self.names, self.ends, self.labels)

    def pixels(self, index: int) -> None:
        """Return None: image files are decoded."""

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Do nothing: opening the files ahead would wait for the server as often as reading them does."""


def check_folders(root: Path) -> None:
    """Raise UserError if ``scan`` would, without listing every image."""
    for split, names in zip(("train", "val"), _both_splits(root), strict=True):
        _check_classes(root, split, names)


def check_validation(root: Path) -> None:
    """Raise UserError if ``scan_validation`` would, without listing every image."""
    names, _ = _validation_split(root)
    _check_classes(root, "val", names)


def scan(root: Path) -> tuple[ImageFolder, ImageFolder]:
    """Return the training and the validation split under ``root``.

    The folders are listed once; the list is kept until a folder changes.

    Raises:
        UserError: If a folder is missing, a class has no images, or val has a class that train lacks.
    """
    return scan_training(root), scan_validation(root)


def scan_training(root: Path) -> ImageFolder:
    """Return the training split.

    Raises:
        UserError: As ``scan`` does.
    """
    train, _ = _both_splits(root)
    return _open(root, "train", train, train)


def scan_validation(root: Path) -> ImageFolder:
    """Return the validation split; if there is no training split, its own folders define the classes.

    Raises:
        UserError: As ``scan`` does.
    """
    names, classes = _validation_split(root)
    return _open(root, "val", names, classes)


def _validation_split(root: Path) -> tuple[list[str], list[str]]:
    """Return the class folders of val, and the class names that define its labels."""
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
    names = class_folders(root / split)
    if not names:
        raise UserError(f"{root / split} has no class folders; it must hold one folder of images a class")
    return names


def _check_classes(root: Path, split: str, names: list[str]) -> None:
    """Raise UserError if a class has no images; remove a kept index whose numbers of entries are out of date."""
    folder = root / split
    for name in names:
        with os.scandir(folder / name) as entries:
            found = any(is_image_name(entry.name) for entry in entries)
        if not found:
            require_images(folder / name, look_into(folder / name))

    def fault(kept: Index) -> str:
        """Return how the index's entry counts differ from the folders'; counts are quicker to check than names."""
        if [stamp[0] for stamp in kept.about["stamps"]] != names:
            return ""
        with ThreadPoolExecutor(_THREADS) as threads:
            there = threads.map(lambda name: len(os.listdir(folder / name)), names)  # noqa: PTH208  (names alone)
            for name, before, now in zip(names, kept.about["entries"], there, strict=True):
                if before != now:
                    return f"is of {before} files in {shown(name)}, where there are {now}"
        return ""

    check_kept(root, split, _KIND, _stamps(folder, names), fault)


def _open(root: Path, split: str, names: list[str], classes: list[str]) -> ImageFolder:
    folder = root / split

    index = load_or_build_index(root, split, _KIND, lambda: _stamps(folder, names), lambda: _list(folder, names))
    if os.environ.get("RANK", "0") == "0":
        _tell_left_out(folder, index.about)
    kept = index.columns
    number = {name: label for label, name in enumerate(classes)}
    numbers = np.asarray([number[name] for name in names], dtype=np.int64)
    return ImageFolder(folder, kept["names"].tobytes(), kept["ends"], numbers[kept["folders"]], classes)


def _stamps(folder: Path, names: list[str]) -> Fingerprint:
    """Return the stamps of the class folders; a folder's times change when a name in it does."""
    return [index_cache.stamp_of(name, (folder / name).stat()) for name in names]


def _list(folder: Path, names: list[str]) -> Index:
    """List all images with their folder's number in ``names``, and count the left-out files that may be images."""
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
    """Return the images in subfolders of a class folder.

    Args:
        folder: The class folder.
        contents: Its entries, as returned by ``look_into``.
        within: Path in front of each returned path, which is relative to ``folder``.
    """
    inside = ((folder / name, os.path.join(within, name)) for name in contents.folders)  # noqa: PTH118
    return list(chain.from_iterable(images_below(*place) for place in inside))


def _deeper(folder: Path, by_name: list[tuple[str, FolderContents]]) -> list[str]:
    return list(chain.from_iterable(deeper_images(folder / name, contents, name) for name, contents in by_name))


def _some(paths: list[str]) -> list[Any]:
    """Return the number of paths and the first in order; empty if there are none."""
    return [len(paths), shown(min(paths))] if paths else []


def _tell_left_out(folder: Path, about: Mapping[str, Any]) -> None:
    """Warn of files that are not trained on although the user may expect it."""
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
    """Raise UserError if a class ``folder`` has no images among its ``contents``."""
    if contents.images:
        return
    advice = "add some, or remove the folder"
    if deeper := deeper_images(folder, contents):
        advice = f"{len(deeper)} lie in folders inside it, as {shown(min(deeper))}; move them up into {folder}"
    raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}); {advice}")
