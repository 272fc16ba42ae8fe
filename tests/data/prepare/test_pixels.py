"""Decoded images as a format: `data prepare --format pixels` stores what the loaders would make of the originals."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from imagenet_fast.data.pixels import ImageDecodeError, decode, shrunk, store_pixels
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.data.source import ImageSource, open_training, open_validation
from imagenet_fast.data.verify import verify
from tests.data.encoded import BAD, IMAGES
from tests.data.small import LOADERS, one_class, opened

SIDE = 60  # of images of 70 to 140 pixels
PIXELS = Settings(format="pixels", resize=SIDE, quality=None, shard_size=200_000)


def shown(images: ImageSource, side: int = 0) -> list[tuple[str, bytes]]:
    """Each image's class and pixels, in no order."""
    labels, names = images.labels.tolist(), images.classes
    pixels = (shrunk(decode(images.read(index)), side) for index in range(len(images)))
    return sorted((names[label], store_pixels(image)) for label, image in zip(labels, pixels, strict=True))


def test_pixels_are_those_that_the_loaders_make(image_dir: Path, tmp_path: Path):
    prepare(image_dir, tmp_path, PIXELS, subset=True)
    assert len(list((tmp_path / "train").glob("*.tar"))) > 1
    for opening in (open_training, open_validation):
        assert shown(opening(tmp_path)) == shown(opening(image_dir), SIDE)
    again = prepare(image_dir, tmp_path, PIXELS, subset=True)
    assert again.already


def test_every_loader_shows_the_same_of_them(image_dir: Path, tmp_path: Path):
    prepare(image_dir, tmp_path, PIXELS, subset=True)
    batches = [list(islice(opened(tmp_path, loader).train, 5)) for loader in LOADERS]
    for others in batches[1:]:
        for (ours, labels), (theirs, same_labels) in zip(batches[0], others, strict=True):
            assert labels.equal(same_labels)
            assert (ours - theirs).abs().mean() < 0.05, "DALI resizes by itself"


@pytest.mark.parametrize("kind", IMAGES)
def test_images_of_every_kind_are_stored_as_they_are_decoded(kind: str):
    pixels = decode(IMAGES[kind])
    stored = decode(store_pixels(pixels))
    assert np.array_equal(stored, pixels)
    assert not stored.flags.writeable, "it is a view of what was read"


def test_a_part_of_an_image_is_none_and_other_files_of_the_kind_are_read():
    whole = store_pixels(np.full((5, 7, 3), 9, dtype=np.uint8))
    with pytest.raises(ImageDecodeError, match=r"truncated|not enough"):
        decode(whole[:-1])
    assert decode(b"P6 # a comment\n7 5 255 " + bytes(105)).shape == (5, 7, 3)


def test_what_cannot_be_decoded_is_kept_as_it_is_and_found(tmp_path: Path):
    bad = next(content for content in BAD.values() if len(content) > 100)
    source = one_class(tmp_path / "source", {"good": next(iter(IMAGES.values()))})
    (source / "train" / "all" / "bad.jpg").write_bytes(bad)
    prepare(source, tmp_path / "out", PIXELS, subset=True)
    images = open_training(tmp_path / "out")
    assert bad in {images.read(index) for index in range(len(images))}
    assert len(verify(tmp_path / "out").quarantine) == 1
