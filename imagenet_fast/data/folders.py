"""Read images from one folder per class: ``train/<class>/*`` and ``val/<class>/*``.

Which files are images and which folders are classes is one rule, for all code that lists folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.index import Index, digest_of, load_or_build_index, map_in_order
from imagenet_fast.errors import UserError, warn

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".avif", ".ppm", ".pgm",
)  # fmt: skip
"""Suffixes of images, in upper or lower case: torchvision's, and others that the loaders read."""

_SYSTEM = (
    "@eadir", "@recycle", "@recently-snapshot", "@tmp", "#recycle", "#snapshot", "__macosx", "__pycache__",
    "$recycle.bin", "system volume information", "lost+found",
)  # fmt: skip
"""Names in lower case of folders that systems create beside the user's."""

_COLUMNS = {"names": "|u1", "ends": "<i8", "folders": "<i8"}


def is_image_name(name: str) -> bool:
    """Return whether a file of this name is an image.

    An AppleDouble file (``._*``), which macOS leaves beside others, is not.
    """
    return name.lower().endswith(SUFFIXES) and not name.startswith("._")


def is_class_name(name: str) -> bool:
    """Return whether a folder of this name is a class: hidden folders and system folders are not."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


def shown(name: str) -> str:
    """Return a file name as text that can be printed; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def ordered_by_number(names: Collection[str]) -> list[str]:
    """Return names in the order that they have as text once the numbers in them have equally many digits."""
    return sorted(names, key=lambda name: re.sub("[0-9]+", lambda number: number[0].zfill(20), name))


@dataclass(frozen=True)
class FolderContents:
    """The entries of one folder by kind, each list sorted."""

    path: Path
    images: list[str]
    folders: list[str]
    """Folders that may hold images, and links to such folders."""
    others: list[str]
    """All other files."""

    def deeper(self) -> list[str]:
        """Return the images in subfolders, as paths relative to this folder; in them, links are not followed."""
        found = []
        for top in self.folders:
            for place, folders, files in os.walk(self.path / top):
                folders[:] = sorted(name for name in folders if is_class_name(name))
                inside = os.path.relpath(place, self.path)
                found += [os.path.join(inside, name) for name in sorted(files) if is_image_name(name)]  # noqa: PTH118
        return found

    def require_images(self) -> None:
        """Raise UserError if there are no images in this class folder."""
        if self.images:
            return
        advice = "add some, or remove the folder"
        if deeper := self.deeper():
            advice = f"{len(deeper)} lie in folders inside it, as {shown(min(deeper))}; move them up into {self.path}"
        raise UserError(f"{self.path} holds no images ({', '.join(SUFFIXES)}); {advice}")


def list_folder(folder: Path) -> FolderContents:
    """List the entries of ``folder`` by kind, from their names and types alone."""
    images: list[str] = []
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            named_so = is_image_name(entry.name)
            if not entry.is_dir(follow_symlinks=not named_so):  # following a million links would take long
                (images if named_so else others).append(entry.name)
            elif is_class_name(entry.name):
                folders.append(entry.name)
    return FolderContents(folder, sorted(images), sorted(folders), sorted(others))


def class_folders(split: Path) -> list[str]:
    """Return the names of the class folders in ``split``, sorted.

    Raises UserError if a link leads nowhere: without its class, others would have other labels.
    """
    contents = list_folder(split)
    for name in contents.others:
        if not (name.startswith(".") or (split / name).exists()):
            raise UserError(
                f"{split / shown(name)} is a link that leads nowhere; make it lead to its class, or remove it"
            )
    return contents.folders


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

    def without(self, names: Collection[str]) -> ImageFolder:
        """Return the split without the images of these names."""
        start = os.path.join(self.folder, "")  # noqa: PTH118
        if not any(name.startswith(start) for name in names):
            return self
        kept = np.asarray([self.name(index) not in names for index in range(len(self))])
        lengths = np.diff(self.ends, prepend=0)
        files = np.frombuffer(self.names, np.uint8)[np.repeat(kept, lengths)]
        return replace(self, names=files.tobytes(), ends=np.cumsum(lengths[kept]), labels=self.labels[kept])

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image ``index``."""
        with open(self.name(index), "rb", 0) as file:  # noqa: PTH123
            return file.read()

    def digest(self) -> str:
        """Return a digest of the names and labels of all images."""
        return digest_of(self.names, self.ends, self.labels)

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Do nothing: opening the files ahead would wait for the server as often as reading them does."""


def scan_split(root: Path, split: Literal["train", "val"]) -> ImageFolder:
    """Return a split; its folders are listed once, until one changes. The training split defines the classes.

    Raises:
        UserError: A folder is missing, a class has no images, or val has a class that train lacks.
    """
    names, classes = names_of(root, split)
    folder = root / split
    paths = [folder / name for name in names]  # their times change when a name in them does
    index = load_or_build_index(root, split, _COLUMNS, paths, lambda: _index(folder, names))
    if (apart := index.about.get("apart")) and os.environ.get("RANK", "0") == "0":
        warn(
            f"{folder}: {apart[0]} images lie in no class's own folder, as {apart[1]}, and are left out; move them "
            "into the folder of their class"
        )
    return _numbered(folder, index.columns, names, classes)


def every_image(folder: Path) -> ImageFolder:
    """Return all images in the class folders of ``folder``, some of which may have none; there is no index of them."""
    names = class_folders(folder)
    listed = list(map_in_order(lambda name: list_folder(folder / name), names))
    return _numbered(folder, _columns(listed), names, names)


def names_of(root: Path, split: Literal["train", "val"]) -> tuple[list[str], list[str]]:
    """Return the class folders of a split, and the class names that define its labels. Raises UserError."""
    if split == "val" and not (root / "train").is_dir():
        names = _class_names(root, "val")
        return names, names
    train, val = both_splits(root)
    return (train if split == "train" else val), train


def both_splits(root: Path) -> tuple[list[str], list[str]]:
    """Return the class folders of train and of val. Raises UserError if one is of val alone, or there are none."""
    train, val = (_class_names(root, split) for split in ("train", "val"))
    strangers = sorted(set(val) - set(train))
    if strangers:
        raise UserError(
            f"{root / 'val'} has {len(strangers)} class(es) that train lacks, the first '{shown(strangers[0])}'; "
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


def _numbered(folder: Path, columns: Mapping[str, NDArray[Any]], names: list[str], classes: list[str]) -> ImageFolder:
    label = {name: number for number, name in enumerate(classes)}
    numbers = np.asarray([label[name] for name in names], dtype=np.int64)
    return ImageFolder(folder, columns["names"].tobytes(), columns["ends"], numbers[columns["folders"]], classes)


def _columns(listed: Sequence[FolderContents]) -> dict[str, NDArray[Any]]:
    """Return the columns of an index: the images' names, where each ends, and the number of its class folder."""
    files = [os.fsencode(file) for contents in listed for file in contents.images]
    return {
        "names": np.frombuffer(b"".join(files), np.uint8),
        "ends": np.cumsum([len(file) for file in files], dtype=np.int64),
        "folders": np.repeat(np.arange(len(listed)), [len(contents.images) for contents in listed]),
    }


def _index(folder: Path, names: list[str]) -> Index:
    """List all images with the number of their class folder, and count those that are left out."""

    def listed(name: str) -> tuple[FolderContents, list[str]]:
        contents = list_folder(folder / name)
        contents.require_images()
        return contents, contents.deeper()

    found = list(map_in_order(listed, names))
    apart = list_folder(folder).images
    apart += [f"{name}/{path}" for name, (_, deeper) in zip(names, found, strict=True) for path in deeper]
    about = {"apart": [len(apart), shown(min(apart))]} if apart else {}
    return Index(about, _columns([contents for contents, _ in found]))
