"""A cache of decoded images: the same pixels, filled once, by however many, and believed only where it is right."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import shutil
import signal
import time
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from imagenet_fast.data import decoded_cache as caches
from imagenet_fast.data import mmap_store
from imagenet_fast.data.decode import decode
from imagenet_fast.data.decoded_cache import Cache, fill, fill_caches, open_cache
from imagenet_fast.data.image_source import ImageDecodeError, ImageSource
from imagenet_fast.data.imagefolder import ImageFolder, scan_training, scan_validation
from imagenet_fast.data.resize import shrunk
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import differences, digest, recipe_tables
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import make_images, refusal_of, tables, tiers
from tests.data import small
from tests.data.encoded import BAD, IMAGES
from tests.data.small import as_format, cut, image_data, one_class, opened, put, replaced, same, with_bad_images
from tests.e2e.command import wait_for

SIDE = 60  # of images of 70 to 140 pixels


def recipe(**changes: object) -> Recipe:
    return parse_recipe("test", tables(data=image_data(**changes).model_dump()))


def epochs(root: Path, cache: Path | None, ranks: int = 1, **changes: object) -> list[tuple[Tensor, Tensor]]:
    """Three epochs of 3 steps of 12 images, each rank's batches in turn, and an evaluation."""
    changes = {"cache": "" if cache is None else str(cache), "cache_side": SIDE, **changes}
    batching = Batching(ranks, 2, 6 // ranks)
    ranked = [opened(root, "folder", batching, rank, workers=2, **changes) for rank in range(ranks)]
    shown = [b for _ in range(9) for dataset in ranked for b in islice(dataset.train, batching.accumulation)]
    return shown + [batch for dataset in ranked for batch in dataset.next_evaluation()]


def opened_cache(folder: Path, images: ImageSource, side: int = SIDE) -> Cache:
    """Once nobody has it any more, as only then it is made anew."""
    wait_until_unused(folder / f"train-{side or 'whole'}")
    return open_cache(folder, "train", images, side)


def wait_until_unused(*folders: Path) -> None:
    gc.collect()
    wait_for(lambda: all(map(mmap_store.alone, folders)))


def filled(folder: Path, images: ImageSource, side: int = SIDE) -> Cache:
    cache = opened_cache(folder, images, side)
    assert sum(fill(cache, 2)) == len(images)
    return cache


def expected(images: ImageSource, index: int, side: int = SIDE) -> np.ndarray:
    return shrunk(decode(images.read(index)), side)


def test_cached_images_are_those_of_the_loader_also_those_that_stand_in_for_bad_ones(image_dir: Path, tmp_path: Path):
    root = with_bad_images(image_dir, tmp_path / "data")
    without = epochs(root, None, on_bad_image="skip")
    for ranks in (1, 2, 3):  # the first one fills it
        cached = epochs(root, tmp_path / "cache", ranks, on_bad_image="skip")
        assert same(cached if ranks == 1 else cached[: 9 * 6], without if ranks == 1 else without[: 9 * 6])
    assert not same(epochs(root, None, cache_side=0, on_bad_image="skip"), without)
    with pytest.raises(UserError, match="cannot be decoded"):
        epochs(root, tmp_path / "cache")


def test_after_the_first_epoch_images_are_not_read_again(image_dir: Path, tmp_path: Path, capfd):
    split = scan_training(image_dir)
    cache = filled(tmp_path, split)
    told = capfd.readouterr().err
    assert re.search(r"^40 images, with a shorter side of at most 60, will take about .* kB in .*train-60; ", told)
    assert not cache.missing
    gone = Cache(cache.folder, Gone(**vars(split)), SIDE, cache._kept, True)
    for index in range(40):
        assert np.array_equal(gone.pixels(index), expected(split, index))
    size = (tmp_path / "train-60" / "pixels").stat().st_size
    del cache, gone
    again = opened_cache(tmp_path, split)
    assert not again.missing
    assert sum(fill(again, 2)) == 0
    assert (tmp_path / "train-60" / "pixels").stat().st_size == size
    assert not capfd.readouterr().err


class Gone(ImageFolder):
    def read(self, index: int) -> bytes:
        raise AssertionError(f"{self.name(index)} is read")


def test_images_of_every_kind_come_out_as_they_are_decoded_and_bad_ones_stay_bad(tmp_path: Path, capfd):
    split = scan_training(one_class(tmp_path / "of every kind é\n", IMAGES | BAD))
    for side in (1, 0):
        cache = filled(tmp_path / "cache ü", split, side)
        assert capfd.readouterr().err.count("it is left out") == len(BAD) == len(cache.missing)
        del cache
        again = opened_cache(tmp_path / "cache ü", split, side)
        for index in range(len(split)):
            if Path(split.name(index)).stem in BAD:
                with pytest.raises(ImageDecodeError):
                    again.pixels(index)
                continue
            pixels = again.pixels(index)
            assert np.array_equal(pixels, expected(split, index, side)), split.name(index)
            assert not side or min(pixels.shape[:2]) <= side


def fill_in_a_process(root: Path, folder: Path, begin: int) -> None:
    """All images, from ``begin`` on in a circle."""
    split = scan_training(root)
    cache = open_cache(folder, "train", split, SIDE)
    for step in range(len(split)):
        index = (begin + step) % len(split)
        assert np.array_equal(cache.pixels(index), expected(split, index))
        time.sleep(0.01)


@pytest.mark.ci
def test_several_processes_fill_it_and_when_one_is_killed_the_others_go_on(image_dir: Path, tmp_path: Path):
    forked = multiprocessing.get_context("forkserver")
    fillers = [forked.Process(target=fill_in_a_process, args=(image_dir, tmp_path, 13 * n)) for n in range(3)]
    for filler in fillers:
        filler.start()
    index = tmp_path / "train-60" / "index"
    wait_for(lambda: index.exists() and np.count_nonzero(np.fromfile(index, dtype=np.uint64)) > 5)
    fillers[0].kill()
    for filler in fillers:
        filler.join()
    assert [filler.exitcode for filler in fillers] == [-signal.SIGKILL, 0, 0]
    split = scan_training(image_dir)
    cache = open_cache(tmp_path, "train", split, SIDE)
    assert not cache.missing
    assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(40))


@pytest.mark.parametrize("kind", tiers(small.FORMATS[:1], small.FORMATS))
def test_it_is_the_same_cache_however_the_data_is_named(tmp_path: Path, kind: str, monkeypatch, capfd):
    root = as_format(make_images(tmp_path / "the data é", train=9, val=3), kind, tmp_path / "shards")
    (tmp_path / "link").symlink_to(root)
    shutil.copytree(root, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for place in (root, Path(root.name), tmp_path / "link", root / ".." / "copy"):
        wait_until_unused(*tmp_path.glob("cache/*"))
        fill_caches(place, tmp_path / "cache", SIDE, 1)
        told = capfd.readouterr().err
        assert told.count("will take about") == 2 * (place is root or place.name == "copy"), place
        assert ("is of other images or of an earlier version: it is made anew" in told) == (place.name == "copy")


def mirrored(train: Path) -> None:
    for path in train.glob("*/*"):
        with Image.open(path) as image:
            image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path, quality=95)


WRONG = [
    ("data/train/class0", lambda folder: put(folder, "999.jpg"), "is of other images"),
    ("data/train", mirrored, "has other pixels than the images have now"),
    ("cache/train-60/pixels", cut(40_000), "is damaged"),
    ("cache/train-60/index", replaced(np.random.default_rng(1).bytes(56)), "is damaged"),
    ("cache/train-60/about.json", replaced(b"[]"), "is damaged"),
]
"""What befalls a file, and what is said of the cache."""


def test_one_that_is_not_right_is_made_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    root = make_images(tmp_path / "data", train=6, val=1)
    filled(tmp_path / "cache", scan_training(root))
    for file, damage, reason in WRONG:
        capfd.readouterr()
        damage(tmp_path / file)
        split = scan_training(root)
        cache = filled(tmp_path / "cache", split)
        assert re.search(f"train-60 {reason}.*: it is made anew\n", capfd.readouterr().err), file
        assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(len(split)))
        del cache


def test_one_in_use_is_not_made_anew_for_other_images(image_dir: Path, tmp_path: Path):
    split = scan_training(image_dir)
    cache = filled(tmp_path, split)
    told = refusal_of(open_cache, tmp_path, "train", scan_validation(image_dir), SIDE)
    assert "is of other images or of an earlier version, and another run, " in told
    assert not cache.missing


def test_its_keys_are_checked_and_only_the_side_binds_a_run(tmp_path: Path):
    assert image_data().cache_side == 0
    assert image_data(cache="/somewhere").cache_side == 256
    assert image_data(cache="/somewhere", cache_side=0).cache_side == 0
    one, other, none = (recipe(cache=place, cache_side=256) for place in ("/a", "/b", ""))
    assert digest(one) == digest(other) == digest(none)
    assert differences(recipe_tables(one), recipe()) == ["data.cache_side (256, now 0)"]
    assert "dali takes encoded images; --set data.loader=folder" in refusal_of(image_data, "dali", cache="/somewhere")
    with pytest.raises(UserError, match=r"cache_side \(50\) must be at least resize \(56\).*--set data.cache_side=56"):
        image_data(cache="/somewhere", cache_side=50)


def test_a_place_that_cannot_be_is_refused(image_dir: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/train-60 cannot be made .*; give another data.cache"):
        open_cache(tmp_path / "file", "train", scan_training(image_dir), SIDE)


def test_after_a_crash_of_the_node_only_what_was_synced_is_believed(image_dir: Path, tmp_path: Path, monkeypatch):
    split = scan_training(image_dir)
    cache = open_cache(tmp_path, "train", split, SIDE)
    for index in range(20):
        cache.pixels(index)
        if index == 9:
            cache.sync()
    monkeypatch.setattr(caches, "_boot", lambda: "another")
    del cache
    assert opened_cache(tmp_path, split).missing == list(range(10, 40))


def test_a_disk_that_is_too_small_is_refused_and_a_full_one_costs_no_images(image_dir, tmp_path, monkeypatch, capfd):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    split = scan_training(image_dir)
    cache = open_cache(tmp_path, "train", split, SIDE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(40))
    told = capfd.readouterr().err
    assert told.count("warning: ") == 1
    assert re.search("takes no more images (.*No space left.*): .*; free some space and start again", told)
    with pytest.raises(UserError, match=r"is not whole .*; free some space and run this again"):
        list(fill(cache, 1))
    usage = shutil.disk_usage(tmp_path)._replace(free=600_000)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda path: usage)
    told = r"as large as they are, take about 1.\d MB in .*, and its disk has 6\d\d.\d kB free, .* a data.cache_side of"
    with pytest.raises(UserError, match=told):
        open_cache(tmp_path, "train", split, 0)
