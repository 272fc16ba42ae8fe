"""Loaders timed beside others: the figures are there, and say what they are of."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from imagenet_fast.bench.dataloaders import Loader, bench_loading
from imagenet_fast.data.folders import ImageFolder
from imagenet_fast.data.loader import THREADS
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.source import open_training
from imagenet_fast.data.throughput import make_photos, measure
from tests.bench.small import benched
from tests.conftest import refusal_of
from tests.data.small import CPU, FORMATS, WHOLE, as_format, scan


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """For photos that are made without scikit-learn, whose import takes longer."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)


@pytest.mark.parametrize(
    ("count", "made_of"), [(1, "noise"), pytest.param(6, "parts of scikit-learn's", marks=pytest.mark.ci)]
)
def test_photos_are_made_of_the_usual_size_and_are_all_different(
    count: int, made_of: str, tmp_path: Path, request: pytest.FixtureRequest
):
    if made_of == "noise":
        request.getfixturevalue("noise")
    assert make_photos(tmp_path, count).startswith(made_of)
    train, val = scan(tmp_path)
    assert len(val) == 1
    assert len({train.read(index) for index in range(count)}) == len(train) == count
    for index in range(count):
        assert Image.open(train.name(index)).size == (500, 375)
        assert 40_000 < len(train.read(index)) < 200_000


@pytest.mark.ci
def test_every_loader_is_timed_in_one_run_and_drawn(tmp_path: Path):
    words = "data --image-size 32 --batch 2 --workers 1 --seconds 0 --rounds 2 --loaders"
    rates, printed = benched(tmp_path, words, ",".join(get_args(Loader)))
    assert [rate["loader"] for rate in rates] == list(get_args(Loader))
    for rate in rates:
        assert 0 < rate["slowest"] <= rate["images_per_s"] <= rate["fastest"]
        assert rate["images_per_core_s"] > 0
        assert (rate["batch"], rate["workers"], rate["image_size"]) == (2, 1, 32)
    assert "torchvision-io" in printed


def test_photos_may_be_shrunk_first(tmp_path: Path, refusal: Callable[..., str], noise: None):
    make_photos(tmp_path, 2, side=120)
    train, val = scan(tmp_path)
    assert {Image.open(name).size for name in (train.name(0), train.name(1), val.name(0))} == {(160, 120)}
    (rate,) = bench_loading(["threads"], None, image_size=32, batch=2, workers=1, seconds=0, resize=120)
    assert rate.reads == "jpg, 160 x 120"
    (rate,) = bench_loading(["threads"], None, image_size=32, batch=2, workers=1, seconds=0, resize=512)
    assert rate.reads == "jpg, 500 x 375", "they are not enlarged"
    said = refusal("bench", "data", "--data", str(tmp_path), "--resize", "120")
    assert f"run `data prepare --resize` on {tmp_path} first" in said


def test_made_photos_go_only_when_no_thread_reads_them(noise: None, monkeypatch, capsys):
    quick = ImageFolder.read

    def slow(images: ImageFolder, index: int) -> bytes:
        time.sleep(0.01)
        return quick(images, index)

    monkeypatch.setattr(ImageFolder, "read", slow)
    (rate,) = bench_loading(["threads"], None, image_size=32, batch=4, workers=2, seconds=0, resize=32)
    for thread in threading.enumerate():
        if thread.name.startswith(THREADS):
            thread.join()
    assert rate.images_per_s
    assert not capsys.readouterr().err, "no warning of a photo that is gone"


def test_where_dali_is_not_installed_it_is_left_out(noise: None, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (rate,) = bench_loading(["dali", "threads"], None, image_size=32, batch=2, workers=1, seconds=0)
    assert rate.loader == "threads"
    assert "warning: dali is left out: DALI is not installed (`pip install" in capsys.readouterr().err
    assert "DALI is not installed (`pip install" in refusal_of(bench_loading, ["dali"], None, 32, 2, 1, 0)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_and_its_first_images_become_pixels(form: str, tmp_path: Path, noise: None, monkeypatch):
    make_photos(tmp_path / "folders", 20, side=64)
    root = as_format(tmp_path / "folders", form, tmp_path / "shards")
    read: set[int] = set()
    kind = type(open_training(root))
    quick = kind.read
    monkeypatch.setattr(kind, "read", lambda images, index: (read.add(index), quick(images, index))[1])
    (rate,) = bench_loading(["pixels"], root, image_size=32, batch=2, workers=1, seconds=0)
    assert read == {*range(16)}, "some to say what they are, and two batches to be stored"
    assert (rate.images, rate.reads) == (f"images in {root}", "ppm, 85 x 64")
    rates = bench_loading(["threads", "decoding"], root, image_size=32, batch=2, workers=1, seconds=0)
    assert [rate.reads for rate in rates] == ["jpg, 85 x 64", "jpg, 85 x 64"]


def test_stored_pixels_are_read_as_they_are(tmp_path: Path, noise: None, capsys):
    make_photos(tmp_path / "folders", 3)
    prepare(
        tmp_path / "folders", tmp_path / "out",
        WHOLE.model_copy(update={"format": "pixels", "resize": 64, "shard_size": 2**20}), subset=True,
    )  # fmt: skip
    names: list[Loader] = ["threads", "pixels", "decoding", "torchvision-io"]
    (rate,) = bench_loading(names, tmp_path / "out", image_size=32, batch=2, workers=1, seconds=0)
    assert (rate.loader, rate.reads) == ("threads", "ppm, 85 x 64")
    assert rate.title.startswith(f"decoded images in {tmp_path / 'out'}; to 32 pixels")
    assert capsys.readouterr().err.count(" is left out: ") == 3
    said = refusal_of(bench_loading, names[3:], tmp_path / "out", 32, 2, 1, 0)
    assert said == "--loaders torchvision-io cannot be timed: it reads class folders, not shards; name others"


def test_more_batches_come_before_the_clock_than_a_loader_has_ready():
    for workers, ready in ((1, 6), (8, 18)):
        batches = count()
        measure(batches, 1, 0, CPU, workers)
        assert next(batches) == ready + 1


def cut_off(root: Path) -> Path:
    """The first of four images, of which the end is lost."""
    make_photos(root, 4, side=64)
    bad = min((root / "train").glob("*/*"))
    bad.write_bytes(bad.read_bytes()[:500])
    return bad


def test_an_image_that_is_cut_off_is_named_or_passed_over(refusal: Callable[..., str], tmp_path: Path, noise: None):
    bad, data = cut_off(tmp_path), f"--data {tmp_path} --seconds 0 --rounds 1 --workers 1"
    said = refusal("bench", "data", *f"{data} --batch 4 --loaders decoding".split())
    assert f"{bad} cannot be decoded" in said
    said = refusal("bench", "data", *f"{data} --batch 9 --loaders threads".split())
    assert "holds 4 images, fewer than a batch; --batch 4" in said
    (rate,) = bench_loading(["threads"], tmp_path, image_size=32, batch=4, workers=1, seconds=0)
    assert rate.images_per_s


@pytest.mark.ci
def test_torchvision_names_such_an_image(tmp_path: Path, noise: None):
    cut_off(tmp_path)
    said = refusal_of(bench_loading, ["torchvision-pil"], tmp_path, 32, 4, 1, 0)
    assert "such files; take them away to measure" in said
