"""Divide the images of a source into pieces, and write a piece: a class's folder, or a shard.

It is decided which image goes into which piece before the first is written. So any worker may write any piece, and any
piece may be written again, with the same bytes.

In shards, training images are sorted by a hash of their names. Neighbours, which are read together, are then of many
classes. This also helps readers that shuffle no more than a shard or two (ours draw each epoch from the whole set).
Unlike a shuffle by a random generator, the order is the same with every version of every library, and from any source.
Validation images are sorted by class and name, as in folders.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image
from pydantic import PositiveInt

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.data.pixels import ImageDecodeError, decode, kind_of, shrunk, store_pixels
from imagenet_fast.data.prepare.files import SPLITS, SourceClass, SourceFile
from imagenet_fast.data.shards import CLASSES, IMAGES
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import read_text
from imagenet_fast.units import size_text

PreparedFormat = Literal["folder", "webdataset", "pixels"]
"""Image files, or WebDataset shards of them, or WebDataset shards of decoded images (``pixels.store_pixels``)."""

SHRUNK_QUALITY = 95
"""JPEG quality of shrunk images, unless told otherwise."""

_SEED = b"imagenet-fast"
_WHEN_S = 1_325_376_000  # 2012, as in ImageNet's archives; tars store a time, and must always be the same
_SAMPLE = 256  # images, written to estimate how many fit into a shard or on a disk


class Settings(Table):
    """The settings that decide the bytes of the result, besides the source."""

    format: PreparedFormat
    resize: PositiveInt | None
    quality: PositiveInt | None
    shard_size: PositiveInt | None = None
    """Bytes per shard; None for folders."""

    def __str__(self) -> str:
        """Return the settings as command-line options."""
        shards = "" if self.shard_size is None else f" --shard-size {size_text(self.shard_size)}"
        shrunk = "" if self.resize is None else f" --resize {self.resize}"
        quality = "" if self.quality is None else f" --quality {self.quality}"
        return f"--format {self.format}{shards}{shrunk}{quality}"

    @property
    def decodes(self) -> bool:
        """True if images are decoded and written anew; False if their bytes are copied."""
        return self.resize is not None or self.format == "pixels"


class Labelled(NamedTuple):
    """An image and its label, an index into the sorted class names."""

    file: SourceFile
    label: int


class Piece(NamedTuple):
    """A part of a split that is written in one go."""

    split: str
    name: str
    """The name of the folder or file in the split's folder."""
    first: int
    """The number of a shard's first image in its split."""
    images: Sequence[Labelled]
    ratio: float
    """Bytes that images of the split take when written, by those in the source."""

    @property
    def size(self) -> int:
        """The bytes of the images in the source."""
        return sum(image.file.size for image in self.images)


def pieces_of(
    images: Mapping[SourceClass, Sequence[SourceFile]], names: Sequence[str], settings: Settings
) -> list[Piece]:
    """Return the pieces of a result: one a class, or shards of ``settings.shard_size`` bytes.

    If images are to be shrunk, their new size is estimated from a sample of each split. The class ``names`` are in the
    order of labels. Raises UserError if a split would have too many shards.
    """
    label = {name: number for number, name in enumerate(names)}
    pieces: list[Piece] = []
    for split in SPLITS:
        labelled = {
            of: [Labelled(f, label[of.name]) for f in files] for of, files in images.items() if of.split == split
        }
        every = [image for of_class in labelled.values() for image in of_class]
        if settings.format == "folder":
            ratio = _written_ratio(every, settings)
            pieces += [Piece(split, of.name, 0, of_class, ratio) for of, of_class in labelled.items()]
            continue
        if split == "train":
            every.sort(key=lambda image: _hash(names[image.label], image.file.name))
        else:
            every.sort(key=lambda image: (image.label, image.file.name))
        ratio = _written_ratio(every, settings)
        shards = list(_cut(every, ratio, settings.shard_size or 0))
        begins = accumulate(map(len, shards), initial=0)
        for number, (begin, shard) in enumerate(zip(begins, shards, strict=False)):
            pieces.append(Piece(split, f"{split}-{number:06}.tar", begin, shard, ratio))
    return pieces


def _hash(name: str, file: str) -> bytes:
    return hashlib.blake2b(os.fsencode(f"{name}/{file}"), digest_size=16, key=_SEED).digest()


def _cut(images: Sequence[Labelled], ratio: float, most: int) -> Iterator[list[Labelled]]:
    """Yield the images of each shard, which take at most so many bytes."""
    shard: list[Labelled] = []
    filled = 0.0
    for image in images:
        size = image.file.size * ratio
        if filled and filled + size > most:
            yield shard
            shard, filled = [], 0.0
        shard.append(image)
        filled += size
    if shard:
        yield shard


def _written_ratio(images: Sequence[Labelled], settings: Settings) -> float:
    """Return the bytes that a sample of the images takes when written, by those in the source; 1 if these are 0."""
    before = after = 0
    for file, _ in images[:: max(1, len(images) // _SAMPLE)] if settings.decodes else ():
        before += file.size
        after += len(_encoded(file, settings))
    return after / before if before else 1.0


def write_piece(piece: Piece, path: Path, settings: Settings, on_bytes: Callable[[int], None]) -> None:
    """Write a piece to the folder or file ``path``, and call ``on_bytes`` with the size of each image in the source."""

    def samples() -> Iterator[Sample]:
        for file, label in piece.images:
            yield Sample(file.name, _encoded(file, settings), label)
            on_bytes(file.size)

    if settings.format == "folder":
        path.mkdir()
        for sample in samples():
            with (path / sample.name).open("xb") as target:
                target.write(sample.encoded)
    else:
        write_tar(path, enumerate(samples(), piece.first))


def _encoded(file: SourceFile, settings: Settings) -> bytes:
    """Return the bytes to keep of an image: unchanged if it cannot be decoded, which `data verify` tells."""
    content = file.read()
    with suppress(ImageDecodeError):
        if settings.format == "pixels":
            return store_pixels(shrunk(decode(content), settings.resize or 0))
        if settings.resize is not None and settings.quality is not None:
            return shrunk_jpeg(content, settings.resize, settings.quality)
    return content


def shrunk_jpeg(content: bytes, side: int, quality: int) -> bytes:
    """Return ``content`` as a JPEG with the short side ``side`` in pixels, without metadata.

    It is unchanged if its short side is not longer. The pixels are those that the loaders see. Grey stays grey.

    Raises:
        ImageDecodeError: The loaders cannot decode the image.
    """
    pixels = decode(content)
    small = shrunk(pixels, side)
    if small is pixels:
        return content
    is_grey = bool((pixels == pixels[..., :1]).all())
    written = io.BytesIO()
    Image.fromarray(small[..., 0] if is_grey else small).save(written, "JPEG", quality=quality)
    return written.getvalue()


# Shards.


class Sample(NamedTuple):
    """An image as it is stored, with its name in the source."""

    name: str
    encoded: bytes
    label: int
    """An index into the class names."""


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the class names to ``classes.txt`` in ``folder``."""
    atomic_write_text(folder / CLASSES, _lines(classes), fsync=True)


def check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Raise UserError if ``classes.txt`` in ``folder`` has other names already."""
    path = folder / CLASSES
    if path.exists() and read_text(path) != _lines(classes):
        raise UserError(
            f"{path} names other classes than are to be written there; give another directory, or remove what is there"
        )


def _lines(classes: Sequence[str]) -> str:
    return "".join(f"{name}\n" for name in classes)


def write_tar(path: Path, samples: Iterable[tuple[int, Sample]]) -> None:
    """Write one WebDataset shard of samples, each with its number, which becomes its key."""
    with tarfile.TarFile(path, "w", format=tarfile.USTAR_FORMAT, copybufsize=1 << 20) as tar:
        for number, sample in samples:
            named = Path(sample.name).suffix[1:].lower()
            kind = kind_of(sample.encoded) or (named if named in IMAGES else "jpg")
            for extension, content in ((kind, sample.encoded), ("cls", b"%d" % sample.label)):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size, member.mtime = len(content), _WHEN_S
                tar.addfile(member, io.BytesIO(content))
    os.utime(path, (_WHEN_S, _WHEN_S))
