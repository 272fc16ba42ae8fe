"""Read images from a few large files: WebDataset tars, in which ``KEY.jpg`` is an image and ``KEY.cls`` its label."""

from __future__ import annotations

import os
import resource
import tarfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.archives import tar_members
from imagenet_fast.data.folders import SUFFIXES
from imagenet_fast.data.index import Index, digest_of, load_or_build_index, map_in_order
from imagenet_fast.data.pixels import ImageDecodeError, Pixels, size_by_header
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.load import read_text

_COLUMNS = {
    "shards": "<i4", "offsets": "<i8", "lengths": "<i8", "before": "<i8", "labels": "<i8", "heights": "<i4",
    "widths": "<i4", "stored": "|b1",
}  # fmt: skip
"""Columns of a shard index, with their dtypes.

For each image: the number of its shard; the offset and the length of its bytes there; how many bytes before them the
header of its member begins; its label; and, by ``size_by_header``, its height and width, or 0, and whether its pixels
are stored.
"""

CLASSES = "classes.txt"
"""The file with the class names, one per line in the order of labels, for shards that only have numbers."""

_Row = tuple[int, int, int, int, int, int, bool]
"""Offset, length and so on of one image, as in ``_COLUMNS``."""

IMAGES = ("jpg", "jpeg", "png", "bmp", "webp", "ppm")
"""Suffixes of images in tars."""

_DIGITS = 20  # more than any label has
_HINT = "a shard holds images and their labels as KEY.jpg and KEY.cls (of other archives make some: `data prepare`)"
_NAMES = f"images are named KEY.SUFFIX with one of {', '.join(IMAGES)}, and there is no dot in the name of a KEY"


class Shards:
    """One split in shards. Many threads may read at once; shards are opened when needed."""

    def __init__(self, files: Sequence[Path], index: Index, classes: list[str]) -> None:
        """Create the split of the images that ``index`` lists in ``files``.

        Raises:
            UserError: A label is of none of the ``classes``.
        """
        self.files = [str(file) for file in files]
        self.labels: NDArray[np.int64] = index.columns["labels"]
        self.classes = classes
        self._shards, self._offsets, self._lengths, self._before = (
            index.columns[name] for name in ("shards", "offsets", "lengths", "before")
        )
        sides = np.stack((index.columns["heights"], index.columns["widths"]), 1)
        self.pixel_sides = sides * index.columns["stored"][:, None]
        """Height and width of each image whose pixels are stored, int32 [images, 2]; 0 of others."""
        self.jpeg_sides = sides - self.pixel_sides
        """Height and width of each JPEG of a kind that all decoders know, int32 [images, 2]; 0 of others."""
        self._open = lru_cache(_descriptors(len(files)))(Descriptor)
        if len(strange := np.flatnonzero(self.labels >= len(classes))):
            raise UserError(
                f"{self.name(strange[0])} has the label {self.labels[strange[0]]}, counted from 0, and there are "
                f"{len(classes)} classes, by {CLASSES} or the training split; both splits must know the same"
            )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._offsets)

    def name(self, index: int) -> str:
        """Return ``shard.tar: member``, by the member's header, or the shard and offset if it cannot be read."""
        file = self.files[self._shards[index]]
        try:
            with open(file, "rb") as shard:  # noqa: PTH123
                shard.seek(self._offsets[index] - self._before[index])
                with tarfile.open(fileobj=shard, mode="r:") as tar:
                    member = tar.next()
        except (OSError, ValueError, tarfile.TarError):
            member = None
        return f"{file}: {member.name if member else f'byte {self._offsets[index]}'}"

    def without(self, names: Collection[str]) -> Shards:
        """Return the split without the images of these names; names are read in shards alone that are named there."""
        bad: list[int] = []
        for number, file in enumerate(self.files):
            if any(name.startswith(f"{file}: ") for name in names):
                some = range(*np.searchsorted(self._shards, (number, number + 1)).tolist())
                bad += [index for index in some if self.name(index) in names]
        kept = copy(self)
        for column in ("labels", "pixel_sides", "jpeg_sides", "_shards", "_offsets", "_lengths", "_before"):
            setattr(kept, column, np.delete(getattr(self, column), bad, axis=0))
        return kept if bad else self

    def read(self, index: int) -> bytes:
        """Return image ``index``, still encoded. Raises ImageDecodeError if the shard ends before the image does."""
        length = int(self._lengths[index])
        content = self._open(self.files[self._shards[index]]).read(int(self._offsets[index]), length)
        if len(content) < length:
            raise ImageDecodeError("its shard is truncated")
        return content

    def digest(self) -> str:
        """Return a digest of the shards' names, and of the places and labels of all images.

        The images' own names are left out: reading them would take long.
        """
        names = b"\0".join(os.fsencode(os.path.basename(file)) for file in self.files)  # noqa: PTH119
        return digest_of(names, self._shards, self._offsets, self._lengths, self.labels)

    def readahead(self, indices: NDArray[np.int64]) -> None:
        """Ask the system to start reading these images: a file server is then waited for once, not once for each."""
        places = [column[indices] for column in (self._lengths, self._offsets, self._shards)]
        order = np.lexsort(places)
        with suppress(OSError):  # whoever reads the image meets it again, and can name the image or skip it
            for length, begin, shard in zip(*(place[order].tolist() for place in places), strict=True):
                descriptor = self._open(self.files[shard])
                os.posix_fadvise(descriptor.number, begin, length, os.POSIX_FADV_WILLNEED)

    def read_rows(self, indices: NDArray[np.int64], first: NDArray[np.int32], into: Sequence[Pixels]) -> list[int]:
        """Read rows of stored pixels of each image, from its ``first`` on, to fill its memory.

        Return the places of those among ``indices`` that could not be read.
        """
        heights, widths = self.pixel_sides[indices].astype(np.int64).T
        begins = self._offsets[indices] + self._lengths[indices] - 3 * widths * (heights - first)
        failed = []
        places = zip(self._shards[indices].tolist(), begins.tolist(), into, strict=True)
        for place, (shard, begin, memory) in enumerate(places):
            try:
                done = os.preadv(self._open(self.files[shard]).number, [memory.data], begin)
            except OSError:
                done = -1
            if done < len(memory):
                failed.append(place)
        return failed


class Descriptor:
    """A file open for reading, closed once nothing refers to it: never while a thread reads it."""

    def __init__(self, path: str) -> None:
        """Open the file at ``path``."""
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``, or fewer where the file ends."""
        return os.pread(self.number, length, offset)


def open_webdataset(root: Path, split: str, files: Sequence[Path], training: Sequence[Path] = ()) -> Shards:
    """Open the images of a ``split`` in tars, whose labels are numbers from 0 on.

    Those in the ``training`` files decide which classes there are; without any, the split's own. Raises UserError if
    there is no image, or a shard is damaged.
    """
    index = _index_of(root, split, files)
    deciding = _index_of(root, "train", training) if training and split != "train" else index
    return Shards(files, index, _class_names(root, deciding.columns["labels"]))


def _index_of(root: Path, split: str, files: Sequence[Path]) -> Index:
    def make() -> Index:
        found = list(map_in_order(_samples, files))
        table = np.asarray([row for rows in found for row in rows], dtype=np.int64).reshape(-1, 7)
        if not len(table):
            raise UserError(f"{root}: there is no image in the {len(files)} shard(s) of the {split} split")
        shards = np.repeat(np.arange(len(files)), list(map(len, found)))
        named = zip(_COLUMNS.items(), (shards, *table.T), strict=True)
        return Index({}, {name: column.astype(dtype) for (name, dtype), column in named})

    return load_or_build_index(root, split, _COLUMNS, files, make)


def _class_names(root: Path, labels: NDArray[np.int64]) -> list[str]:
    """Return the names of classes: those in ``classes.txt``, else the labels.

    Raises UserError if a label is missing then: nobody knows how many there are.
    """
    if (names := _read_classes(root)) is not None:
        return names
    there = np.unique(labels).tolist()
    if len(there) <= there[-1]:
        missing = next(number for number, label in enumerate(there) if label != number)
        raise UserError(
            f"{root}: labels run up to {there[-1]} and {len(there)} of them occur, {missing} not; name all classes in "
            f"{root / CLASSES}, one a line in the order of labels"
        )
    return list(map(str, there))


def _read_classes(root: Path) -> list[str] | None:
    """Return the names in ``classes.txt``; None without it. Raises UserError if it is not UTF-8, or has one twice."""
    path = root / CLASSES
    if not path.exists():
        return None
    names = read_text(path).splitlines()
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{path}: every class has a name of its own; write one a line, in the order of labels")
    return names


def _descriptors(files: int) -> int:
    """Return how many shards to hold open: at most a quarter of the files that this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files if allowed == resource.RLIM_INFINITY else max(1, min(files, allowed // 4))


def _samples(shard: Path) -> list[_Row]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    with shard.open("rb") as file:
        for member in tar_members(file, str(shard), "copy or make it again"):
            if member.isdir():
                continue
            key, extension = _key(member.name)
            found: dict[str, Any]
            content: Any
            match extension:
                case "cls":
                    found, content = labels, _label(shard, file, member)
                case _ if extension in IMAGES:
                    found, content = images, member
                case _ if f".{extension.rpartition('.')[2]}" in (".cls", *SUFFIXES):
                    raise UserError(f"{shard}: {member.name} would not be read; {_NAMES}, so rename it")
                case _:  # WebDataset may store other files with an image
                    continue
            if key in found:
                raise UserError(f"{shard}: {member.name} is the second of its key; give every sample its own")
            found[key] = content
        for key in images.keys() ^ labels.keys():
            there, lacking = ("its label", f"{key}.cls") if key in images else ("its image", f"{key}.jpg")
            name = images[key].name if key in images else f"{key}.cls"
            raise UserError(f"{shard}: {name} lacks {there}, {lacking}; {_HINT}")
        rows = list[_Row]()
        for key, member in images.items():
            begin, size = member.offset_data, member.size
            rows.append((begin, size, begin - member.offset, labels[key], *size_by_header(file, begin, begin + size)))
        return sorted(rows)


def _key(name: str) -> tuple[str, str]:
    """Return a sample's key and extension, split at the first dot of the base name, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""


def _label(shard: Path, file: BinaryIO, member: tarfile.TarInfo) -> int:
    file.seek(member.offset_data)
    text = file.read(min(member.size, _DIGITS)).strip()
    if member.size > _DIGITS or not text.isdigit() or int(text) >= 1 << 31:
        raise UserError(f"{shard}: {member.name} holds no label; write a number there as plain text, from 0 on")
    return int(text)
