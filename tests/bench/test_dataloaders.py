"""Loaders timed beside others: the figures are there, and say what they are of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from imagenet_fast.bench.dataloaders import Loader, bench_loading, parse_loaders
from imagenet_fast.bench.tables import loading_table
from imagenet_fast.cli.main import main
from imagenet_fast.data.imagefolder import scan
from imagenet_fast.data.throughput import make_photos
from tests.e2e.command import imagenet_fast


def test_photos_are_made_of_the_usual_size_and_are_all_different(tmp_path: Path):
    assert make_photos(tmp_path, 6) == "parts of scikit-learn's two photos"
    train, val = scan(tmp_path)
    assert (len(train), len(val)) == (6, 1)
    assert len({train.read(index) for index in range(6)}) == 6
    for index in range(6):
        assert 40_000 < len(train.read(index)) < 200_000
        with Image.open(train.name(index)) as photo:
            assert photo.size == (500, 375)


def test_without_scikit_learn_they_are_noise_that_takes_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert make_photos(tmp_path, 1).startswith("noise")
    train, _ = scan(tmp_path)
    assert 40_000 < len(train.read(0)) < 200_000


def test_every_loader_is_timed_in_one_run_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = ("--image-size", "32", "--batch", "2", "--workers", "1", "--seconds", "0", "--rounds", "2")
    chosen = ("--loaders", ",".join(get_args(Loader)))
    files = ("--json", str(tmp_path / "rates.json"), "--png", str(tmp_path / "rates.png"))
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", "bench", "data", *options, *chosen, *files])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    rates = json.loads((tmp_path / "rates.json").read_text())
    assert [rate["loader"] for rate in rates] == list(get_args(Loader))
    for rate in rates:
        assert 0 < rate["slowest"] <= rate["images_per_s"] <= rate["fastest"]
        assert rate["images_per_core_s"] > 0
        assert (rate["batch"], rate["workers"], rate["image_size"]) == (2, 1, 32)
    with Image.open(tmp_path / "rates.png") as image:
        assert image.width > 300
    printed = capsys.readouterr().out
    assert "torchvision-io" in printed
    assert "fastest here: " in printed


def test_photos_may_be_shrunk_first(tmp_path: Path, refusal: Callable[..., str]):
    make_photos(tmp_path, 2, side=120)
    train, val = scan(tmp_path)
    for name in (train.name(0), train.name(1), val.name(0)):
        with Image.open(name) as photo:
            assert photo.size == (160, 120)
    (rate,) = bench_loading(["folder"], None, image_size=32, batch=2, workers=1, seconds=0, resize=120)
    assert rate.images.endswith("photos, 120 pixels on the shorter side")
    said = refusal("bench", "data", "--data", str(tmp_path), "--resize", "120")
    assert f"run `data prepare --resize` on {tmp_path} first" in said


def test_made_photos_go_only_when_no_thread_reads_them():
    words = ("--loaders", "folder", "--batch", "64", "--workers", "2", "--seconds", "0", "--rounds", "1")
    assert "cannot be read" not in imagenet_fast("bench", "data", *words).stderr


def test_where_dali_is_not_installed_the_table_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (rate,) = bench_loading(["dali"], None, image_size=32, batch=2, workers=1, seconds=0)
    assert rate.images_per_s is None
    assert list(map(str, loading_table([rate]).columns[1].cells)) == ["is not installed"]


def test_loaders_are_chosen_by_name(refusal: Callable[..., str], tmp_path: Path):
    assert parse_loaders("dali, synthetic") == ["dali", "synthetic"]
    assert "--loaders dali,disk" in refusal("bench", "data", "--loaders", "dali,disk")
    make_photos(tmp_path, 2)
    small = ("--data", str(tmp_path), "--batch", "9", "--loaders", "folder")
    assert "holds 2 images, fewer than a batch; --batch 2" in refusal("bench", "data", *small)


def test_images_that_cannot_be_decoded_are_named_or_passed_over(refusal: Callable[..., str], tmp_path: Path):
    make_photos(tmp_path, 4)
    bad = min((tmp_path / "train").glob("*/*"))
    bad.write_bytes(bad.read_bytes()[:500])
    measured = ("bench", "data", "--data", str(tmp_path), "--batch", "4", "--seconds", "0", "--rounds", "1")
    said = refusal(*measured, "--workers", "1", "--loaders", "decoding")
    assert f"{bad} cannot be decoded" in said
    assert "such files; take them away to measure" in refusal(
        *measured, "--workers", "1", "--loaders", "torchvision-pil"
    )
    (rate,) = bench_loading(["folder"], tmp_path, image_size=32, batch=4, workers=1, seconds=0)
    assert rate.images_per_s


def test_shards_are_refused_as_such(refusal: Callable[..., str], tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / f"{split}-000.tar").write_bytes(b"")
    assert "holds shards, and bench data reads class folders" in refusal("bench", "data", "--data", str(tmp_path))
