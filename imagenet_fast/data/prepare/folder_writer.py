"""Write images as files, in one folder per class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from imagenet_fast.data.prepare.jpeg_resize import stored
from imagenet_fast.data.prepare.source_files import SourceClass, SourceFile
from imagenet_fast.data.prepare.staging_dir import Made, Piece, Settings, Tell

_SAMPLED_CLASSES, _SAMPLED_IMAGES = 16, 4


def folder_pieces(classes: Mapping[SourceClass, int], settings: Settings) -> list[Piece]:
    """Return one piece per class, in the order of ``classes``, which maps each to its bytes in the source."""
    return [
        Piece(of.split, of.name, (of.name,), size, partial(_make, of, size, settings)) for of, size in classes.items()
    ]


def sample_of_classes(classes: Sequence[SourceClass]) -> Iterator[SourceFile]:
    """Yield the first images of some of the classes, spread over all of them."""
    for of in classes[:: max(1, len(classes) // _SAMPLED_CLASSES)]:
        yield from islice((file for file in of.listed() if file.is_image), _SAMPLED_IMAGES)


def _make(of: SourceClass, size: int, settings: Settings, place: Path, tell: Tell) -> Made:
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
