"""WebDataset shards: tar files in which ``KEY.jpg`` is an image and ``KEY.cls`` its label, a number from 0 on."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.archives import tar_members
from imagenet_fast.data.formats.index_cache import Index, Kind, load_or_build_index, stamps_of
from imagenet_fast.data.formats.shard_reader import (
    CLASSES,
    COLUMNS,
    Row,
    Shards,
    columns_of,
    look_through,
    read_classes,
)
from imagenet_fast.data.image_names import SUFFIXES
from imagenet_fast.errors import UserError

IMAGES = ("jpg", "jpeg", "png", "bmp", "webp", "ppm")
KIND = Kind("webdataset", COLUMNS)

_DIGITS = 20  # more than any label has
_HINT = "a shard holds images and their labels as KEY.jpg and KEY.cls (of other archives make some: `data prepare`)"
_NAMES = f"images are named KEY.SUFFIX with one of {', '.join(IMAGES)}, and there is no dot in the name of a KEY"


class TarShards(Shards):
    """One split in tar shards. Names of images are read from the tar headers before them."""

    def name(self, index: int) -> str:
        """Return ``shard.tar: member``, or the shard and offset if the header cannot be read."""
        file = self.files[self._shards[index]]
        try:
            with open(file, "rb") as shard:  # noqa: PTH123
                shard.seek(self._offsets[index] - self._before[index])
                with tarfile.open(fileobj=shard, mode="r:") as tar:
                    member = tar.next()
        except (OSError, ValueError, tarfile.TarError):
            member = None
        return f"{file}: {member.name}" if member is not None else super().name(index)


def open_webdataset(root: Path, split: str, files: Sequence[Path], training: Sequence[Path] = ()) -> Shards:
    """Open the images in ``files``.

    The class names are those in ``classes.txt``. Without it they are numbers, those of the labels in the ``training``
    files, or in ``files`` if there are no training files.

    Args:
        root: The data directory.
        split: The name of the split.
        files: The shards of the split.
        training: The shards of the training split; empty if there are none.

    Raises:
        UserError: A shard is damaged, or a label is not a number or is of no class.
    """
    index = _open(root, split, files)
    labels = index.columns["labels"]
    classes = read_classes(root)
    if classes is None:
        deciding = _open(root, "train", training) if training else index
        classes = _numbered(root, deciding.columns["labels"])
    shards = TarShards(files, index, labels, classes)
    if labels.max() >= len(classes):
        raise UserError(
            f"{shards.name(int(labels.argmax()))} has the label {labels.max()}, and there are {len(classes)} classes, "
            f"by {CLASSES} or the training split; labels run from 0 on"
        )
    return shards


def _numbered(root: Path, labels: NDArray[np.int64]) -> list[str]:
    """Return the labels as names. Raises UserError if a number is missing: nobody knows what the others are then."""
    there = np.unique(labels)
    if len(there) <= there[-1]:
        missing = int(np.argmin(there == np.arange(len(there))))
        raise UserError(
            f"{root}: labels run up to {there[-1]} and {len(there)} of them occur, {missing} not; name all classes in "
            f"{root / CLASSES}, one a line in the order of labels"
        )
    return [str(label) for label in there]


def check_tar(shard: Path) -> None:
    """Raise UserError if ``shard`` does not begin as a tar file."""
    with shard.open("rb") as file:
        next(_members(shard, file), None)


def _open(root: Path, split: str, files: Sequence[Path]) -> Index:
    return load_or_build_index(root, split, KIND, lambda: stamps_of(root, files), lambda: _index(root, split, files))


def _index(root: Path, split: str, files: Sequence[Path]) -> Index:
    rows = list(look_through(files, _look))
    if not any(rows):
        raise UserError(f"{root}: there is no image in the {len(files)} tar(s) of the {split} split")
    return Index({}, columns_of(rows))


def _look(shard: Path) -> list[Row]:
    """Return the images of a shard, in the order in which they are stored."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    with shard.open("rb") as file:
        for member in _members(shard, file):
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
    return sorted(
        (member.offset_data, member.size, member.offset_data - member.offset, labels[key])
        for key, member in images.items()
    )


def _members(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar. Raises UserError for links and the like, or if the tar is not whole."""
    for member in tar_members(file, str(shard), "copy or make it again"):
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise UserError(f"{shard}: {member.name} is no regular file but a link or the like; {_HINT}")
        if member.isreg():
            yield member


def _key(name: str) -> tuple[str, str]:
    """Return a sample's key and extension, split at the first dot of the base name, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""


def _label(shard: Path, file: BinaryIO, member: tarfile.TarInfo) -> int:
    file.seek(member.offset_data)
    text = file.read(min(member.size, _DIGITS)).strip()
    if member.size > _DIGITS or not text.isdigit() or int(text) >= 1 << 31:
        raise UserError(f"{shard}: {member.name} holds no label; write a number there, from 0 on")
    return int(text)
