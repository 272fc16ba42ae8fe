"""Loaders tried on a node."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from imagenet_fast.data.throughput import fastest
from imagenet_fast.doctor.loader_check import try_loaders
from tests.data.small import put


def test_the_fastest_of_our_own_is_told_with_its_lead():
    for rates, said in (
        ({"folder": 140.0, "dali": 100.0, "decoding": 900.0}, "fastest here: folder, 1.40 x dali"),
        ({"dali": 150.0, "folder": 100.0}, "fastest here: dali, 1.50 x folder"),
        ({"folder": 140.0, "dali": None}, "fastest here: folder, dali is not installed"),
        ({"folder": 140.0, "dali": 0.0}, "fastest here: folder, dali gave no image"),
        ({"folder": 140.0, "torchvision-pil": 100.0}, ""),
        ({"dali": None}, ""),
    ):
        assert fastest(rates) == said


def test_both_are_tried_on_the_images_given(image_dir: Path):
    (found,) = try_loaders(image_dir, ranks=1, seconds=0)
    assert found.state == "ok"
    said = r"folder \d+ and dali \d+ images a second.*; fastest here: (folder|dali), \d+\.\d\d x (dali|folder)"
    assert re.fullmatch(said, found.said)


def test_without_dali_the_other_is_tried(image_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (found,) = try_loaders(image_dir, ranks=10_000, seconds=0)
    assert found.said.endswith("fastest here: folder, dali is not installed")


def test_a_bad_image_among_the_first_is_named_and_a_directory_that_cannot_be_read_not_again(tmp_path: Path):
    assert try_loaders(tmp_path / "gone", 1) == []
    for split in ("train", "val"):
        put(tmp_path / split / "a [b]", "bad.jpg", content=b"no image")
    (found,) = try_loaders(tmp_path, 1, seconds=0)
    assert found.state == "warn"
    assert "bad.jpg" in found.said
