"""Data sets that are made or fetched: whole, or not there at all; their progress is for a person at a terminal."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.data import download
from imagenet_fast.data.paths import resolve_data_dir
from imagenet_fast.progress import measurement_bar, progress_bars
from tests.conftest import Terminal, refusal_of, refuses
from tests.data.prepare.replica import tar_of
from tests.data.small import few_digits, scan


@pytest.mark.ci
def test_the_digits_are_made_once_and_split_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path))
    place = resolve_data_dir("digits", None)
    train, val = scan(place)
    assert (len(train), len(val)) == (1433, 364)
    assert train.classes == [str(digit) for digit in range(10)]
    with Image.open(train.name(0)) as image:
        assert (image.size, image.format, image.mode) == ((64, 64), "JPEG", "RGB")
    written = Path(train.name(0)).stat().st_mtime_ns
    assert resolve_data_dir("digits", None) == place
    assert Path(train.name(0)).stat().st_mtime_ns == written


def test_a_data_set_or_a_cache_that_is_not_there_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path))
    assert "imagenet-fast data fetch cifar10" in refusal_of(resolve_data_dir, "cifar10", None)
    assert "--data DIR" in refusal_of(resolve_data_dir, "imagenet", None)
    (tmp_path / "file").touch()
    few_digits(monkeypatch)
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path / "file"))
    refuses(r"/file/digits cannot be made .*; set IMAGENET_FAST_CACHE", resolve_data_dir, "digits", None)
    for name in ("IMAGENET_FAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)  # as a container may have it
    assert "no home directory; set IMAGENET_FAST_CACHE" in refusal_of(resolve_data_dir, "digits", None)


def test_nothing_is_left_of_a_folder_whose_making_is_interrupted(tmp_path: Path):
    def interrupted() -> None:
        with atomic_directory(tmp_path / "data") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


IMAGES = np.random.default_rng(0).integers(256, size=(6, 20, 32, 32, 3), dtype=np.uint8)
"""Of five batches to train on and one to test, whose labels go round."""
LABELS = np.arange(20, dtype=np.uint8) % 10
PLANES = IMAGES.transpose(0, 1, 4, 2, 3).reshape(6, 20, -1)
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def test_cifar10_is_unpacked_pixel_for_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = tmp_path / "cifar.tgz"
    files = {name: {"labels": LABELS.tolist(), "data": planes} for name, planes in zip(NAMES, PLANES, strict=True)}
    batches = {name: pickle.dumps(of) for name, of in (files | {"batches.meta": {"label_names": []}}).items()}
    archive.write_bytes(gzip.compress(tar_of({f"cifar-10-batches-py/{name}": of for name, of in batches.items()})))
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    sums = {name: hashlib.md5(content).hexdigest() for name, content in batches.items()}
    monkeypatch.setattr(CIFAR10, "train_list", [(name, sums[name]) for name in NAMES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [(NAMES[5], sums[NAMES[5]])])
    monkeypatch.setitem(CIFAR10.meta, "md5", sums["batches.meta"])
    download.fetch_cifar10(tmp_path / "cifar10", archive)
    train, val = scan(tmp_path / "cifar10")
    assert (len(train), len(val)) == (100, 20)
    assert train.classes == list(download.CLASSES)
    for split, number, batch, row in (("train", 47, 2, 7), ("val", 3, 5, 3)):
        with Image.open(tmp_path / "cifar10" / split / download.CLASSES[number % 10] / f"{number:05}.png") as image:
            assert np.array_equal(np.asarray(image), IMAGES[batch, row])


def test_without_any_way_to_cifar10_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CIFAR10, "url", (tmp_path / CIFAR10.filename).as_uri())
    told = r"/cifar-10-python.tar.gz cannot be fetched \(.*No such file.*\); .* give --archive FILE"
    refuses(told, download.fetch_cifar10, tmp_path / "cifar10", None)


def test_a_wrong_archive_is_refused_and_leaves_nothing(tmp_path: Path):
    archive = tmp_path / "cifar.tgz"
    archive.write_bytes(gzip.compress(tar_of({"package/other": b""})))
    for given in (archive, tmp_path / "nowhere.tgz"):
        told = f"{given} is not there, or not cifar-10-python.tar.gz as its authors give it; fetch it again"
        assert refusal_of(download.fetch_cifar10, tmp_path / "cifar10", given) == told
    assert [p.name for p in tmp_path.iterdir()] == ["cifar.tgz"]


def test_what_is_fetched_is_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few_digits(monkeypatch)
    digits = tmp_path / "digits"
    digits.mkdir()  # an empty directory is filled
    assert download.fetch_dataset("digits", digits, None) == digits
    assert download.fetch_dataset("digits", digits, None) == digits
    (tmp_path / "file").touch()
    for name, out, archive, sentence in (
        ("cifar10", digits, None, "digits holds something else than cifar10; choose another --out, or remove it"),
        ("digits", tmp_path / "file", None, "file holds something else than digits"),
        ("digits", digits, tmp_path / "file", "file is for cifar10"),
    ):
        assert sentence in refusal_of(download.fetch_dataset, name, out, archive)


def moved(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    with measurement_bar() as show:
        show("round 1 of 2", 1, 2)
    with progress_bars("images") as bars:
        bars.advance(bars.add_task("decoding", total=2))
    return stderr.getvalue()


def test_a_terminal_shows_what_is_done_and_a_pipe_is_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = moved(Terminal(), monkeypatch)
    assert "round 1 of 2" in shown
    assert "decoding" in shown
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert moved(io.StringIO(), monkeypatch) == ""
