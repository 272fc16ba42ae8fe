"""Divide the output into pieces that workers write: shards of images, or folders by class.

It is decided which image goes into which shard before the first shard is written. So any worker may write any shard,
and any shard may be written again.

Training images are sorted by a hash of their names. Neighbours, which are read together, are then of many classes. This
also helps readers that shuffle no more than a shard or two (ours draw each epoch from the whole set). Unlike a shuffle
by a random generator, the order is the same with every version of every library, and from any source. Validation images
are sorted by class and name, as in folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import NamedTuple

from imagenet_fast.data.formats.shard_writer import Sample, write_tar
from imagenet_fast.data.prepare.jpeg_resize import shrinking_ratio, stored
from imagenet_fast.data.prepare.source_files import SourceClass, SourceFile
from imagenet_fast.data.prepare.staging_dir import SPLITS, Made, Piece, Settings, Splits, Tell
from imagenet_fast.errors import UserError

BYTES_AROUND = 2100
"""Most bytes that an image takes besides its own: headers of the image and its label, and padding."""

_SEED = b"imagenet-fast"
_SAMPLE = 256  # images, shrunk to estimate how many fit into a shard
_MOST = 100_000  # shards; up to this many, names sort as their numbers do


class Placed(NamedTuple):
    """An image and its label."""

    file: SourceFile
    label: int


_SAMPLED_CLASSES, _SAMPLED_IMAGES = 16, 4


@dataclass(frozen=True)
class Listed:
    """The images of a class in the source, and the names of the files that are left out."""

    images: Sequence[SourceFile]
    left_out: tuple[str, ...]


def list_class(of: SourceClass) -> Listed:
    """Return the files of a class.

    Raises:
        UserError: The class has no images, or cannot be listed.
    """
    return Listed(*of.sorted_out())


def in_shards(split: str, listed: Mapping[SourceClass, Listed], names: Sequence[str]) -> list[Placed]:
    """Return all images of a split in the order in which shards hold them; labels are indices into ``names``."""
    label = {name: number for number, name in enumerate(names)}
    images = [
        Placed(file, label[of.name]) for of, found in listed.items() if of.split == split for file in found.images
    ]
    if split == "train":
        return sorted(images, key=lambda placed: _hash(names[placed.label], placed.file.name))
    return sorted(images, key=lambda placed: (placed.label, placed.file.name))


def shard_pieces(placed: Mapping[str, Sequence[Placed]], names: Sequence[str], settings: Settings) -> list[Piece]:
    """Return one piece per shard, filled with images up to ``settings.shard_size`` bytes.

    If images are to be shrunk, their new size is estimated from a sample of each split.

    Args:
        placed: The images of each split, in the order of ``in_shards``.
        names: The class names, in the order of labels.
        settings: The settings of the result.

    Raises:
        UserError: A split would have too many shards.
    """
    pieces = []
    for split in SPLITS:
        images = placed.get(split, ())
        shards = list(_cut(images, settings))
        if len(shards) > _MOST:
            raise UserError(f"{split} would have {len(shards)} shards; give a larger --shard-size")
        begins = accumulate((len(shard) for shard in shards), initial=0)
        for number, (begin, shard) in enumerate(zip(begins, shards, strict=False)):
            name = f"{split}-{number:06}.tar"
            size = sum(image.file.size for image in shard)
            make = partial(_make_shard, name, begin, shard, names, settings)
            pieces.append(Piece(split, name, (name,), size, make))
    return pieces


def sample_of(images: Sequence[Placed]) -> Iterator[SourceFile]:
    """Yield images at even distances: random ones of a training split, and ones from all over a validation split."""
    return (image.file for image in islice(images, 0, None, max(1, len(images) // _SAMPLE)))


def classes_made(
    listed: Mapping[SourceClass, Listed], sized: Mapping[SourceClass, int], shards: Mapping[Piece, Made]
) -> Splits:
    """Return what was made of each class, by split and name.

    Args:
        listed: The images of each class, and what was left out.
        sized: The bytes that each class takes in the source.
        shards: The shards that were made, with the images that could not be decoded.
    """
    odd: dict[tuple[str, str], list[str]] = {}
    for piece, made in shards.items():
        for path in made.undecodable:
            name, _, file = path.partition("/")
            odd.setdefault((piece.split, name), []).append(file)
    splits: Splits = {}
    for of, found in listed.items():
        splits.setdefault(of.split, {})[of.name] = Made(
            images=len(found.images), size=sized[of], left_out=found.left_out,
            undecodable=tuple(sorted(odd.get((of.split, of.name), ()))),
        )  # fmt: skip
    return splits


def _hash(name: str, file: str) -> bytes:
    return hashlib.blake2b(os.fsencode(f"{name}/{file}"), digest_size=16, key=_SEED).digest()


def _cut(images: Sequence[Placed], settings: Settings) -> Iterator[list[Placed]]:
    """Yield the images of each shard."""
    most = settings.shard_size or 0
    ratio = shrinking_ratio(sample_of(images), settings) if settings.decodes else 1.0

    def numbered() -> Iterator[tuple[int, Placed]]:
        shard, filled = 0, 0.0
        for image in images:
            size = image.file.size * ratio
            if filled and filled + size > most:
                shard, filled = shard + 1, 0.0
            filled += size
            yield shard, image

    for _, group in groupby(numbered(), key=lambda pair: pair[0]):
        yield [image for _, image in group]


def _make_shard(
    name: str, begin: int, images: Sequence[Placed], names: Sequence[str], settings: Settings, place: Path, tell: Tell
) -> Made:
    """Write one shard, whose first image is number ``begin`` of the split."""
    undecodable = []

    def samples() -> Iterator[Sample]:
        for file, label in images:
            content, is_undecodable = stored(file, settings)
            undecodable.extend([f"{names[label]}/{file.shown}"] * is_undecodable)
            yield Sample(file.name, content, label)
            tell(file.size)

    write_tar(place / name, enumerate(samples(), begin))
    size = sum(image.file.size for image in images)
    return Made(images=len(images), size=size, undecodable=tuple(undecodable))


def folder_pieces(classes: Mapping[SourceClass, int], settings: Settings) -> list[Piece]:
    """Return one piece per class, in the order of ``classes``, which maps each to its bytes in the source."""
    return [
        Piece(of.split, of.name, (of.name,), size, partial(_copy_class, of, size, settings))
        for of, size in classes.items()
    ]


def sample_of_classes(classes: Sequence[SourceClass]) -> Iterator[SourceFile]:
    """Yield the first images of some of the classes, spread over all of them."""
    for of in classes[:: max(1, len(classes) // _SAMPLED_CLASSES)]:
        yield from islice((file for file in of.listed() if file.is_image), _SAMPLED_IMAGES)


def _copy_class(of: SourceClass, size: int, settings: Settings, place: Path, tell: Tell) -> Made:
    """Write the images of a class, in the order in which they lie in the source."""
    images, left_out = of.sorted_out()
    folder = place / of.name
    folder.mkdir()
    undecodable = []
    for file in images:
        content, is_undecodable = stored(file, settings)
        undecodable += [file.shown] * is_undecodable
        with (folder / file.name).open("xb") as target:
            target.write(content)
        tell(file.size)
    tell(max(0, size - sum(file.size for file in images)))
    return Made(images=len(images), size=size, left_out=left_out, undecodable=tuple(sorted(undecodable)))
