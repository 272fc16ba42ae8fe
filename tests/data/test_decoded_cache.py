"""A cache of decoded images: the same pixels, filled once, by however many, and believed only where it is right."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.data import decoded_cache as caches
from imagenet_fast.data import mmap_store
from imagenet_fast.data.decode import decode
from imagenet_fast.data.decoded_cache import Cache, fill, fill_caches, open_cache
from imagenet_fast.data.format_detection import open_training
from imagenet_fast.data.image_source import ImageDecodeError
from imagenet_fast.data.imagefolder import ImageFolder, scan_training, scan_validation
from imagenet_fast.data.loaders import open_loader
from imagenet_fast.data.resize import shrunk
from imagenet_fast.data.sampler import EvalSampler, TrainSampler
from imagenet_fast.data.verify import verify
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import differences, digest, recipe_tables
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import make_images, tables
from tests.data.encoded import BAD, IMAGES
from tests.data.small import (
    ALONE,
    CPU,
    FORMATS,
    Damage,
    as_format,
    cut,
    image_data,
    one_class,
    opened,
    put,
    replaced,
    with_bad_images,
)

FORKED = multiprocessing.get_context("forkserver")
SIDE = 60  # of images of 70 to 140 pixels


def recipe(**changes: object) -> Recipe:
    return parse_recipe("test", tables(data=image_data(**changes).model_dump()))


def epochs(root: Path, cache: Path | None, ranks: int = 1, **changes: object) -> list[list[Tensor]]:
    """Three epochs of 3 steps of 12 images, each rank's batches in turn, and an evaluation."""
    changes = {"cache": "" if cache is None else str(cache), "cache_side": SIDE, **changes}
    batching = Batching(ranks, 2, 6 // ranks)
    ranked = [opened(root, "folder", batching, rank, workers=2, **changes) for rank in range(ranks)]
    shown = []
    for _ in range(9):
        for dataset in ranked:
            shown += [list(batch) for batch in islice(dataset.train, batching.accumulation)]
    return shown + [list(batch) for dataset in ranked for batch in dataset.next_evaluation()]


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(*pair) for batches in zip(ours, theirs, strict=True) for pair in zip(*batches, strict=True)
    )


def filled(folder: Path, images: ImageFolder, side: int = SIDE) -> Cache:
    cache = open_cache(folder, "train", images, side)
    assert sum(fill(cache, 2)) == len(images)
    return cache


def opened_after_the_end(folder: Path, images: ImageFolder, side: int = SIDE) -> Cache:
    """Once nobody has it any more."""
    gc.collect()
    return open_cache(folder, "train", images, side)


def expected(images: ImageFolder, index: int, side: int = SIDE) -> np.ndarray:
    return shrunk(decode(images.read(index)), side)


def test_cached_images_are_those_of_the_loader(image_dir: Path, tmp_path: Path):
    without = epochs(image_dir, None)
    for ranks in (1, 2, 3):  # the first one fills it
        assert same(epochs(image_dir, tmp_path, ranks)[: 9 * 6], without[: 9 * 6])
    assert same(epochs(image_dir, tmp_path)[9 * 6 :], without[9 * 6 :])
    assert not same(epochs(image_dir, None, cache_side=0), without)


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
    again = opened_after_the_end(tmp_path, split)
    assert not again.missing
    assert sum(fill(again, 2)) == 0
    assert (tmp_path / "train-60" / "pixels").stat().st_size == size
    assert not capfd.readouterr().err


class Gone(ImageFolder):
    def read(self, index: int) -> bytes:
        raise AssertionError(f"{self.name(index)} is read")


def test_images_of_every_kind_come_out_as_they_are_decoded_and_bad_ones_stay_bad(tmp_path: Path, capfd):
    split = scan_training(one_class(tmp_path / "of every kind é\n", IMAGES | BAD))
    for side in (1, 50, 0):
        cache = filled(tmp_path / "cache ü", split, side)
        assert capfd.readouterr().err.count("it is left out") == len(BAD) == len(cache.missing)
        del cache
        again = opened_after_the_end(tmp_path / "cache ü", split, side)
        for index in range(len(split)):
            if Path(split.name(index)).stem in BAD:
                with pytest.raises(ImageDecodeError):
                    again.pixels(index)
                continue
            pixels = again.pixels(index)
            assert np.array_equal(pixels, expected(split, index, side)), split.name(index)
            assert not side or min(pixels.shape[:2]) <= side


def test_others_stand_in_for_bad_images_as_they_do_without_a_cache(image_dir: Path, tmp_path: Path):
    root = with_bad_images(image_dir, tmp_path / "data")
    without = epochs(root, None, on_bad_image="skip")
    for _ in range(2):
        assert same(epochs(root, tmp_path / "cache", on_bad_image="skip"), without)
    with pytest.raises(UserError, match="cannot be decoded"):
        epochs(root, tmp_path / "cache")


def fill_in_a_process(root: Path, folder: Path, begin: int, paused: float = 0.0) -> None:
    """All images, from ``begin`` on in a circle."""
    split = scan_training(root)
    cache = open_cache(folder, "train", split, SIDE)
    for step in range(len(split)):
        index = (begin + step) % len(split)
        assert np.array_equal(cache.pixels(index), expected(split, index))
        time.sleep(paused)


@pytest.mark.ci
def test_several_processes_fill_it_at_the_same_time(image_dir: Path, tmp_path: Path):
    fillers = [FORKED.Process(target=fill_in_a_process, args=(image_dir, tmp_path, 13 * n)) for n in range(3)]
    for filler in fillers:
        filler.start()
    for filler in fillers:
        filler.join()
        assert filler.exitcode == 0
    cache = open_cache(tmp_path, "train", scan_training(image_dir), SIDE)
    assert not cache.missing


@pytest.mark.ci
def test_one_that_is_killed_is_filled_on(image_dir: Path, tmp_path: Path):
    split = scan_training(image_dir)
    left = 40
    for begin in (0, 20):
        filler = FORKED.Process(target=fill_in_a_process, args=(image_dir, tmp_path, begin, 0.01))
        filler.start()
        index = tmp_path / "train-60" / "index"
        while filler.is_alive() and not (
            index.exists() and np.count_nonzero(np.fromfile(index, dtype=np.uint64)) > 43 - left
        ):
            time.sleep(0.001)
        os.kill(filler.pid or 0, signal.SIGKILL)
        filler.join()
        cache = opened_after_the_end(tmp_path, split)
        assert len(cache.missing) < left
        left = len(cache.missing)
        del cache
    cache = opened_after_the_end(tmp_path, split)
    assert sum(fill(cache, 2)) == left
    assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(40))


def spellings(place: Path, root: Path) -> Iterator[Path]:
    """Ways to write ``root``, seen from ``place``: relative, over links to it or into it, with detours."""
    yield root
    yield Path(os.path.relpath(root, place))
    yield root / ".." / root.name / "train" / ".."
    (place / "link").symlink_to(root)
    yield place / "link"
    (place / "parts").mkdir()
    for path in root.iterdir():
        (place / "parts" / path.name).symlink_to(path)
    yield place / "parts"
    if not list(root.glob("train/*.*")):  # no shards, but folders of classes
        for folder in root.glob("*/*/"):
            (place / "classes" / folder.parent.name).mkdir(parents=True, exist_ok=True)
            (place / "classes" / folder.parent.name / folder.name).symlink_to(folder)
        (place / "classes" / "quarantine.json").symlink_to(root / "quarantine.json")
        yield place / "classes"


@pytest.mark.parametrize("kind", [FORMATS[0], *(pytest.param(kind, marks=pytest.mark.ci) for kind in FORMATS[1:])])
def test_it_is_the_same_cache_however_the_data_is_named(
    image_dir: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd
):
    root = tmp_path / "the data é"
    shutil.copytree(image_dir, root)
    (root / "val" / "class1" / "004.jpg").write_bytes(BAD["half a jpeg"])
    root = as_format(root, kind, tmp_path / "shards")
    verify(root)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    for spelling in spellings(place, root):
        fill_caches(spelling, tmp_path / "cache", SIDE, 1)
        told = capfd.readouterr().err
        assert told.count("will take about") == (2 if spelling == root else 0), spelling
        assert "of other images" not in told, spelling
        gc.collect()
    shutil.copytree(root, tmp_path / "copy")
    fill_caches(tmp_path / "copy", tmp_path / "cache", SIDE, 1)
    assert "is of other images or of an earlier version: it is made anew" in capfd.readouterr().err


def mirrored(train: Path) -> None:
    for path in train.glob("*/*"):
        with Image.open(path) as image:
            image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path, quality=95)


def swapped(index: Path) -> None:
    np.roll(np.fromfile(index, dtype=np.uint64), 1).tofile(index)


OTHER, DAMAGED, PIXELS = "is of other images", "is damaged", "has other pixels than the images have now"


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("data/train/class0", lambda folder: put(folder, "999.jpg"), OTHER),
        ("data/train", mirrored, PIXELS),
        ("cache/train-60/pixels", Path.unlink, DAMAGED),
        ("cache/train-60/pixels", cut(60_000), DAMAGED),
        ("cache/train-60/pixels", lambda path: path.write_bytes(bytes(path.stat().st_size)), PIXELS),
        ("cache/train-60/index", cut(48), DAMAGED),
        ("cache/train-60/index", Path.unlink, DAMAGED),
        ("cache/train-60/index", replaced(np.random.default_rng(1).bytes(96)), DAMAGED),
        ("cache/train-60/index", swapped, PIXELS),
        ("cache/train-60/about.json", cut(20), DAMAGED),
        ("cache/train-60/about.json", replaced(b"[]"), DAMAGED),
        (
            "cache/train-60/about.json",
            lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0})),
            OTHER,
        ),
    ],
)
def test_one_that_is_not_right_is_made_anew(
    tmp_path: Path, file: str, damage: Damage, reason: str, capfd: pytest.CaptureFixture[str]
):
    root = make_images(tmp_path / "data", train=12, val=3)
    filled(tmp_path / "cache", scan_training(root))
    gc.collect()
    damage(tmp_path / file)
    split = scan_training(root)
    capfd.readouterr()
    cache = opened_after_the_end(tmp_path / "cache", split)
    assert re.search(f"train-60 {reason}.*: it is made anew\n", capfd.readouterr().err)
    assert len(cache.missing) == len(split)
    assert sum(fill(cache, 2)) == len(split)
    assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(len(split)))


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), ImageDecodeError("cannot be decoded")])
def test_images_that_cannot_be_read_say_nothing_against_a_cache(
    error: Exception, image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    split = scan_training(image_dir)
    filled(tmp_path, split)
    gc.collect()

    def fails(self: ImageFolder, index: int) -> bytes:
        raise error

    monkeypatch.setattr(ImageFolder, "read", fails)
    assert not opened_after_the_end(tmp_path, split).missing


def test_a_cache_of_shards_is_known_by_the_shards(image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reading a million names inside them would take longer than ranks wait for each other."""
    images = open_training(as_format(image_dir, "webdataset", tmp_path / "shards"))
    monkeypatch.setattr(images, "name", None)
    filled(tmp_path / "cache", images)
    gc.collect()
    assert not opened_after_the_end(tmp_path / "cache", images).missing
    there = caches._digest(images)
    (tmp_path / "shards").rename(tmp_path / "moved")
    assert caches._digest(open_training(tmp_path / "moved")) != there


def test_one_in_use_is_not_made_anew_for_other_images(image_dir: Path, tmp_path: Path):
    split = scan_training(image_dir)
    cache = filled(tmp_path, split)
    with pytest.raises(UserError, match="is of other images or of an earlier version, and another run, "):
        open_cache(tmp_path, "train", scan_validation(image_dir), SIDE)
    assert not cache.missing


def test_when_the_machine_went_down_only_what_was_synced_is_believed(
    image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    split = scan_training(image_dir)
    open_cache(tmp_path / "never synced", "train", split, SIDE).pixels(0)
    cache = open_cache(tmp_path, "train", split, SIDE)
    for index in range(10):
        cache.pixels(index)
    cache.sync()
    for index in range(10, 25):
        cache.pixels(index)
    monkeypatch.setattr(caches, "_boot", lambda: "another")
    with pytest.raises(UserError, match="is of before this node started, and another run, or node, uses it"):
        open_cache(tmp_path, "train", split, SIDE)
    del cache
    back = opened_after_the_end(tmp_path, split)
    assert back.missing == list(range(10, 40))
    assert sum(fill(back, 2)) == 30
    del back
    assert not opened_after_the_end(tmp_path, split).missing
    assert len(opened_after_the_end(tmp_path / "never synced", split).missing) == 40


def test_its_keys_are_checked_and_only_the_side_binds_a_run(tmp_path: Path):
    assert image_data().cache_side == 0
    assert image_data(cache="/somewhere").cache_side == 256
    assert image_data(cache="/somewhere", cache_side=0).cache_side == 0
    one, other, none = (recipe(cache=place, cache_side=256) for place in ("/a", "/b", ""))
    assert digest(one) == digest(other) == digest(none)
    assert differences(recipe_tables(one), recipe()) == ["data.cache_side (256, now 0)"]
    with pytest.raises(UserError, match=r"dali takes encoded images; --set data.loader=folder"):
        image_data("dali", cache="/somewhere")
    with pytest.raises(UserError, match=r"cache_side \(50\) must be at least resize \(56\).*--set data.cache_side=56"):
        image_data(cache="/somewhere", cache_side=50)


def test_a_place_that_cannot_be_is_refused(image_dir: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/train-60 cannot be made .*; give another data.cache"):
        open_cache(tmp_path / "file", "train", scan_training(image_dir), SIDE)


@pytest.fixture
def disk(root: None, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A small one of one's own, mounted with options."""
    place = tmp_path / "a disk"

    def mount(*options: str) -> Path:
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)], check=True)
        return place

    yield mount
    gc.collect()
    subprocess.run(["umount", "-l", str(place)], check=True)


FEW = "size=600k"
"""40 images just fit into, but not with what else a cache needs."""


@pytest.mark.ci
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(image_dir: Path, disk: Callable[..., Path]):
    small = disk(FEW)
    with pytest.raises(
        UserError,
        match=r"40 images, as large as they are, take about 1.\d MB in .*, and its disk has 6\d\d.\d kB free, "
        r"which would do for a data.cache_side of \d+; free some, or give another data.cache"
    ):  # fmt: skip
        open_cache(small, "train", scan_training(image_dir), 0)
    assert not list(small.glob("*/pixels"))


@pytest.mark.ci
def test_a_disk_that_fills_up_costs_time_and_no_images(image_dir: Path, disk: Callable[..., Path], capfd):
    split = scan_training(image_dir)
    cache = open_cache(disk(FEW), "train", split, SIDE)
    for _ in range(2):
        for index in range(40):
            assert np.array_equal(cache.pixels(index), expected(split, index))
    told = capfd.readouterr().err
    assert told.count("warning: ") == 1
    assert re.search("takes no more images (.*No space left.*): .*; free some space and start again", told)
    with pytest.raises(UserError, match=r"is not whole .*; free some space and run this again"):
        list(fill(cache, 1))


@pytest.mark.ci
def test_a_whole_one_serves_where_it_cannot_be_written(image_dir: Path, disk: Callable[..., Path]):
    split, place = scan_training(image_dir), disk("size=9m")
    half = open_cache(place, "train", split, SIDE)
    for index in range(20):
        half.pixels(index)
    half.sync()
    del half
    gc.collect()
    disk("remount", "ro")
    cache = open_cache(place, "train", split, SIDE)
    assert cache.missing == list(range(20, 40))
    assert all(np.array_equal(cache.pixels(index), expected(split, index)) for index in range(40))
    told = "is of other images or of an earlier version and cannot be written; give another"
    for name, sentence in (("train", told), ("val", "val-60 cannot be made")):
        with pytest.raises(UserError, match=sentence):
            open_cache(place, name, scan_validation(image_dir), SIDE)


def test_the_command_fills_both_splits_for_runs_to_come(image_dir: Path, tmp_path: Path):
    for _ in range(2):
        done = CliRunner().invoke(
            app, ["data", "cache", "--data", str(image_dir), "--out", str(tmp_path), "--side", str(SIDE)],
            catch_exceptions=False,
        )  # fmt: skip
        assert f"--set data.cache={tmp_path} --set data.cache_side=60" in done.stdout
        gc.collect()
    for split, read in (("train", scan_training), ("val", scan_validation)):
        assert not open_cache(tmp_path, split, read(image_dir), SIDE).missing
    settings = image_data(cache=str(tmp_path), cache_side=SIDE)
    train = open_loader(settings, scan_training(image_dir), TrainSampler(40, ALONE, 0, 1), 1, CPU, 1)
    val = open_loader(settings, scan_validation(image_dir), EvalSampler(7, 8, 1, 0), 2, CPU, 1)
    assert [len(next(iter(loader))[0]) for loader in (train, val)] == [8, 7]


def test_what_a_damaged_shard_held_is_left_out_of_the_cache(image_dir: Path, tmp_path: Path, capfd):
    images = open_training(as_format(image_dir, "webdataset", tmp_path / "shards"))
    shard = min((tmp_path / "shards" / "train").glob("*.tar"))
    cut(shard.stat().st_size // 2)(shard)
    cache = open_cache(tmp_path / "cache", "train", images, SIDE)
    assert sum(fill(cache, 2)) == len(images)
    left_out = capfd.readouterr().err.count("the shard ends before the image does")
    assert 0 < left_out == len(cache.missing) < len(images)


def test_readers_of_a_growing_file_do_not_take_each_others_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One maps the file and is held up, and replaces the longer map that another reader has made since."""
    mmap_store.make_empty(tmp_path, 10)
    writer, reader = (mmap_store.MmapImageStore(tmp_path, 10, mmap_store.INDEX, True, 2**22) for _ in range(2))
    writer.write(0, np.full((100, 100, 3), 1, np.uint8))
    mapped, go_on = threading.Event(), threading.Event()
    map_file = mmap_store.mmap.mmap

    def held_up(*arguments: Any, **options: Any) -> Any:
        made = map_file(*arguments, **options)
        if threading.current_thread().name == "slow":
            mapped.set()
            go_on.wait(20)
        return made

    class Overtaken(mmap_store.MmapImageStore):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)
            if name == "_mapped" and threading.current_thread().name != "slow":
                go_on.set()
                slow.join(20)

    monkeypatch.setattr(mmap_store.mmap, "mmap", held_up)
    slow = threading.Thread(target=lambda: reader.read(0), name="slow")
    slow.start()
    mapped.wait(20)
    for image in range(1, 5):
        writer.write(image, np.full((100, 100, 3), image, np.uint8))
    reader.__class__ = Overtaken
    pixels = reader.read(4)
    assert pixels is not None
    assert (pixels == 4).all()
