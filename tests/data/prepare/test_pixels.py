"""Decoded images as a format: `data prepare --format pixels` stores what the loaders would make of the originals."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from imagenet_fast.data.pixels import ImageDecodeError, decode, shrunk, store_pixels
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.data.source import (
    ImageSource,
    check_folders,
    check_validation,
    find_data,
    open_training,
    open_validation,
)
from imagenet_fast.data.verify import verify
from tests.conftest import refusal_of
from tests.data.encoded import BAD, IMAGES
from tests.data.small import LOADERS, collect, image_data, one_class, opened

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


def test_every_loader_shows_the_same_of_them_and_names_a_shard_that_is_cut_meanwhile(image_dir: Path, tmp_path: Path):
    prepare(image_dir, tmp_path, PIXELS, subset=True)
    trains = [opened(tmp_path, loader).train for loader in LOADERS]
    batches = [list(islice(train, 5)) for train in trains]
    for others in batches[1:]:
        for (ours, labels), (theirs, same_labels) in zip(batches[0], others, strict=True):
            assert labels.equal(same_labels)
            assert (ours - theirs).abs().mean() < 0.05, "DALI resizes by itself"
    for shard in tmp_path.rglob("*.tar"):
        os.truncate(shard, 9000)  # in place: a mapping of it would end the process
    for train in trains:
        told = refusal_of(collect, train, 40)
        assert re.search(r"train-00000\d.tar: .* cannot be decoded \(its shard is truncated\); put", told)


def test_images_that_were_shrunk_to_less_than_loaders_show_are_refused(image_dir: Path, tmp_path: Path):
    """By what would be enlarged: in an evaluation the whole image, in training the largest crop of one."""
    prepare(image_dir, tmp_path, PIXELS, subset=True)
    told = "shrunk to 60 pixels, and the recipe enlarges them to {}; prepare them with --resize {} or more"
    growing = {"image_size": 40, "resize": 50}
    for needed, changes in (
        (60, {"resize": 60}), (61, {"resize": 61}), (64, {"image_size": 32, "eval_size": 48, "resize": 64}),
        (60, growing | {"sizes": [[1, 40], [2, 60]]}), (61, growing | {"sizes": [[1, 61], [2, 40]]}),
        (75, growing | {"sizes": [[1, 60]], "crop": "window"}), (75, growing | {"sizes": [[1, 60]], "augment": False}),
    ):  # fmt: skip
        data = image_data(**changes)
        assert needed <= SIDE or told.format(needed, needed) in refusal_of(find_data, data, tmp_path)
        if needed <= SIDE or "sizes" in changes:  # an evaluation does not show training images
            assert find_data(data, tmp_path, check_validation if needed > SIDE else check_folders) == tmp_path


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
