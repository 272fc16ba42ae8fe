"""Pixels that are resized on the device: those of the folder loader, whatever is cut out of whatever is stored."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from imagenet_fast.data.build import open_loader
from imagenet_fast.data.device import Batch
from imagenet_fast.data.loader import ThreadLoader
from imagenet_fast.data.order import EvalSampler, Order, TrainSampler
from imagenet_fast.data.pixel_loader import PixelLoader, resident_on
from imagenet_fast.data.pixels import store_pixels
from imagenet_fast.data.prepare.write import Sample, write_tar
from imagenet_fast.data.shards import open_webdataset
from imagenet_fast.data.source import ImageSource
from imagenet_fast.recipe.batching import Batching
from tests.conftest import refuses
from tests.data.encoded import BAD, JPEG, encoded
from tests.data.small import ALONE, CPU, image_data

SIZES = [(56, 70), (57, 56), (90, 61), (33, 40), (56, 500), (600, 9), (64, 64), (700, 640)]
CUTS: dict[str, dict[str, Any]] = {
    "cut": {}, "square windows": {"crop": "window"}, "growing": {"sizes": [[1, 34], [2, 36]]},
    "whole": {"augment": False},
    "padded": {"crop": "padded", "crop_padding": 5, "image_size": 48, "resize": 50, "flip": "alternate"},
}  # fmt: skip


def stored(root: Path, images: list[bytes]) -> ImageSource:
    """Images of two classes in a shard, as `data prepare --format pixels` stores them."""
    write_tar(root / "train-0.tar", enumerate(Sample(f"{i}.ppm", image, i % 2) for i, image in enumerate(images)))
    return open_webdataset(root, "train", [root / "train-0.tar"])


def grains(height: int, width: int, seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return store_pixels(np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)))


@pytest.fixture
def pixels(tmp_path: Path) -> ImageSource:
    white = store_pixels(np.full((333, 468, 3), 255, np.uint8))
    return stored(tmp_path, [white, *(grains(*SIZES[seed % len(SIZES)], seed) for seed in range(39))])


def assert_alike(found: list[Batch], expected: list[Batch], most: int = 2) -> None:
    """Within 2 grey levels, in the same order."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.images.stride() == theirs.images.stride()
        apart = (ours.images.int() - theirs.images.int()).abs()
        assert apart.max() <= most
        assert apart.float().mean() < 0.2


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_images_are_those_of_the_folder_loader(pixels: ImageSource, cut: str, trains: bool):
    """In two epochs, from the middle of the first on; some are large, some strips, one white; also within autocast."""
    data = image_data(**CUTS[cut])
    order: Order = TrainSampler(40, ALONE, 0, 1, first_step=2) if trains else EvalSampler(40, 8, 1, 0)
    ours, theirs = (load(pixels, order, data, CPU, 2) for load in (PixelLoader, ThreadLoader))
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(list(islice(ours, 8)), list(islice(theirs, 8)))


def test_images_that_are_not_resized_are_equal_to_the_byte(tmp_path: Path):
    """A thousand crops of padded images, half of them mirrored."""
    pixels = stored(tmp_path, [grains(32, 32, seed) for seed in range(250)])
    data = image_data(crop="padded", crop_padding=4, image_size=32, resize=32)
    order = TrainSampler(250, Batching(1, 50, 1), 0, seed=3)
    ours, theirs = (load(pixels, order, data, CPU, 1) for load in (PixelLoader, ThreadLoader))
    assert_alike(list(islice(ours, 20)), list(islice(theirs, 20)), most=0)


def test_an_image_that_is_stored_otherwise_or_bad_is_treated_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pixels = stored(tmp_path, [*(grains(60, 60, seed) for seed in range(14)), JPEG, next(iter(BAD.values()))])
    data = image_data(on_bad_image="skip")
    order = TrainSampler(16, ALONE, 0, seed=1)
    ours, theirs = (load(pixels, order, data, CPU, 1) for load in (PixelLoader, ThreadLoader))
    assert_alike(list(islice(ours, 4)), list(islice(theirs, 4)))
    assert capsys.readouterr().err.count("another is shown instead") == 2


def test_a_shard_that_is_cut_while_it_is_read_is_named(pixels: ImageSource, tmp_path: Path):
    batches = iter(PixelLoader(pixels, TrainSampler(40, ALONE, 0, seed=1), image_data(), CPU, 1))
    next(batches)
    (tmp_path / "train-0.tar").open("r+b").truncate(9000)
    refuses(r"train-0\.tar.*its shard is truncated", list, islice(batches, 9))


@pytest.mark.parametrize("cut", CUTS)
def test_resident_images_are_those_that_are_read(tmp_path: Path, cut: str):
    pixels = stored(tmp_path, [encoded(Image.new("RGB", (70, 60), (i, 0, 9)), "PNG") for i in range(8)] + [JPEG] * 8)
    data = image_data(**CUTS[cut])
    order = TrainSampler(16, ALONE, 0, seed=1)
    ours = open_loader(data.model_copy(update={"resident": True}), pixels, order, 1, CPU, seed=1)
    assert_alike(list(islice(ours, 4)), list(islice(ThreadLoader(pixels, order, data, CPU, 1), 4)))


@pytest.mark.parametrize(
    ("bad", "told"), [(next(iter(BAD.values())), "cannot be read"), (grains(513, 20, 1), "more than 512 pixels")]
)
def test_a_set_that_cannot_live_on_the_device_is_refused(tmp_path: Path, bad: bytes, told: str):
    pixels = stored(tmp_path, [grains(60, 60, 1), bad])
    assert resident_on(CPU, pixels, image_data()) is None
    told = rf"train-0\.tar.*{told}.*--set data\.resident=false"
    refuses(told, resident_on, CPU, pixels, image_data(resident=True))
