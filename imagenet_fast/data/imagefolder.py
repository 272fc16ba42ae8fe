"""Pictures in one folder a class: ``train/<class>/*`` and ``val/<class>/*``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.formats.kept_index import Index, Kind, Stamps, keep_index, moving
from imagenet_fast.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

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
        """What a person is told where picture ``index`` is bad: its path."""
        begin = self.ends[index - 1] if index else 0
        file = os.fsdecode(self.names[begin : self.ends[index]])
        return os.path.join(self.folder, self.classes[self.labels[index]], file)  # noqa: PTH118  (pathlib is slow)

    def read(self, index: int) -> bytes:
        """Picture ``index``, still encoded."""
        with open(self.name(index), "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Nothing: to open the files would be to wait for the server as often as reading them does."""


def check_folders(root: Path) -> None:
    """Raise UserError where :func:`scan` would, without listing every image."""
    for split, names in zip(("train", "val"), _both_splits(root), strict=True):
        _check_classes(root / split, names)


def check_validation(root: Path) -> None:
    """Raise UserError where :func:`scan_validation` would, without listing every image."""
    names, _ = _validation_split(root)
    _check_classes(root / "val", names)


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
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        raise UserError(f"{root / split} has no class folders; it must hold one folder of images a class")
    return names


def _check_classes(folder: Path, names: list[str]) -> None:
    for name in names:
        with os.scandir(folder / name) as entries:
            _require(any(_is_image(e) for e in entries), folder / name)


def _open(root: Path, split: str, names: list[str], classes: list[str]) -> ImageFolder:
    folder = root / split

    def stamp() -> Stamps:
        """A folder's time changes with its names."""
        return [(name, 0, (folder / name).stat().st_mtime_ns) for name in names]

    kept = keep_index(root, split, _KIND, stamp, lambda: _list(folder, names)).columns
    number = {name: label for label, name in enumerate(classes)}
    numbers = np.asarray([number[name] for name in names], dtype=np.int64)
    return ImageFolder(folder, kept["names"].tobytes(), kept["ends"], numbers[kept["folders"]], classes)


def _list(folder: Path, names: list[str]) -> Index:
    """All files of pictures, by the number of their folder in ``names``."""

    def listed() -> Iterator[list[bytes]]:
        with ThreadPoolExecutor(_THREADS) as threads:
            for name, found in zip(names, threads.map(lambda name: _files(folder / name), names), strict=True):
                moving()
                _require(bool(found), folder / name)
                yield found

    found = list(listed())
    files = [file for files in found for file in files]
    columns: dict[str, NDArray[Any]] = {
        "names": np.frombuffer(b"".join(files), np.uint8),
        "ends": np.cumsum([len(file) for file in files], dtype=np.int64),
        "folders": np.repeat(np.arange(len(names)), [len(files) for files in found]),
    }
    return Index({}, columns)


def _files(folder: Path) -> list[bytes]:
    with os.scandir(folder) as entries:
        return [os.fsencode(name) for name in sorted(entry.name for entry in entries if _is_image(entry))]


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES)


def _require(has_images: bool, folder: Path) -> None:
    if not has_images:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}); add some, or remove the folder")
