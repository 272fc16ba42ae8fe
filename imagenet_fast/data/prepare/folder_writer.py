"""Pictures as files, in a folder a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from imagenet_fast.data.prepare.jpeg_resize import stored
from imagenet_fast.data.prepare.source_files import Located, PictureClass
from imagenet_fast.data.prepare.staging_dir import Made, Piece, Settings, Tell

_SAMPLED_CLASSES, _SAMPLED_PICTURES = 16, 4


def folder_pieces(classes: Mapping[PictureClass, int], settings: Settings) -> list[Piece]:
    """A piece a class, in their order; these come with their bytes in the source."""
    return [
        Piece(of.split, of.name, (of.name,), size, partial(_make, of, size, settings)) for of, size in classes.items()
    ]


def sample_of_classes(classes: Sequence[PictureClass]) -> Iterator[Located]:
    """The first pictures of some of them, from all over."""
    for of in classes[:: max(1, len(classes) // _SAMPLED_CLASSES)]:
        yield from islice((file for file in of.listed() if file.is_picture), _SAMPLED_PICTURES)


def _make(of: PictureClass, size: int, settings: Settings, place: Path, tell: Tell) -> Made:
    """Write pictures in the order in which they lie in the source."""
    pictures, left_out = of.sorted_out()
    folder = place / of.name
    folder.mkdir()
    undecodable = []
    for file in pictures:
        content, is_undecodable = stored(file, settings)
        undecodable += [file.shown] * is_undecodable
        with (folder / file.name).open("xb") as target:
            target.write(content)
        tell(file.size)
    tell(max(0, size - sum(file.size for file in pictures)))
    return Made(pictures=len(pictures), size=size, left_out=left_out, undecodable=tuple(sorted(undecodable)))
