"""Layer profiles: shipped, written by a person's own run, or drawn from a seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from imagenet_fast.cost_model.layer_profile import Layer, Profile, load_profile, random_profile, save_profile
from tests.conftest import refuses

TWO = Profile(
    "two",
    "by hand",
    (Layer("a", "Conv2d", ((8, 3, 3, 3), (8,)), 30.0, 40.0), Layer("b", "Linear", ((10, 8), (10,)), 10.0, 20.0)),
)


def test_profiles_are_read_as_they_were_written(tmp_path: Path):
    for profile in (TWO, random_profile(3), replace(TWO, batch=8, fixed=0.5, memory_gb=80.0)):
        save_profile(profile, tmp_path / "profile.json")
        assert load_profile(str(tmp_path / "profile.json")) == profile


def test_the_shipped_ones_are_of_the_models_they_say():
    for name in ("alexnet", "alexnet-512", "resnet50", "resnet50-512"):
        assert load_profile(name).elements == {"alexnet": 61_100_840, "resnet50": 25_557_032}[name.split("-")[0]]


def test_wrong_names_and_files_are_refused(tmp_path: Path):
    (tmp_path / "bad.json").write_text('{"model": "x"}')
    (tmp_path / "text.json").write_text("x")
    (tmp_path / "folder.json").mkdir()
    for name, sentence in (
        ("vgg", "no layer profile 'vgg'; there are alexnet, .* or give a"),
        (str(tmp_path / "bad.json"), "is not a layer profile"),
        (str(tmp_path / "text.json"), r"is not a layer profile \(Invalid JSON"),
        (str(tmp_path / "folder.json"), r"folder\.json is not a layer profile \(.*Is a directory"),
        *((f"random:{seed}", "give its seed, as random:7") for seed in ("", "-1", "x", "1.5", "²")),
    ):
        refuses(sentence, load_profile, name)


def test_its_course_begins_with_the_last_layer():
    timing = TWO.timing
    assert timing.needed == pytest.approx((0.030, 0.030, 0.0, 0.0))
    assert timing.ready == pytest.approx((0.020, 0.020, 0.060, 0.060))
    assert timing.forward_s == pytest.approx(0.040)
    assert timing.compute_s == pytest.approx(TWO.compute_s)


def test_it_is_stretched_and_shrunk_in_proportion():
    assert TWO.scaled_to(2.0).compute_s == pytest.approx(2.0)
    assert TWO.scaled_to(2.0).forward_s == pytest.approx(0.8)
    assert TWO.scaled_to(0.0).scaled_to(2.0).compute_s == 0.0, "communication alone: there is nothing to scale"
    assert TWO.downscaled(4).layers[0].shapes == ((2, 3, 3, 3), (2,))
    assert TWO.downscaled(100).layers[1].shapes == ((1, 8), (1,)), "never less than one"
    assert (TWO.downscaled(4).compute_s, TWO.downscaled(4).layers[0].kind) == (TWO.compute_s, "Conv2d")


def test_an_all_reduce_is_shared_out_by_elements_the_last_layer_first():
    assert TWO.all_reduce_seconds(3.14) == pytest.approx([0.10, 0.80, 0.08, 2.16])


def test_a_seed_is_always_the_same_network_and_seeds_differ_in_every_way():
    drawn = [load_profile(f"random:{seed}") for seed in range(60)]
    assert drawn == [random_profile(seed) for seed in range(60)]
    giants = []
    for profile in drawn:
        sizes = [layer.elements for layer in profile.layers]
        giants.append(sizes.index(max(sizes)) / (len(sizes) - 1))
        assert 6 <= len(sizes) <= 48
        assert min(sizes) > 0
        assert all(layer.backward_ms > layer.forward_ms > 0 for layer in profile.layers)
    assert min(giants) < 0.1
    assert max(giants) > 0.9
    assert len({len(profile.layers) for profile in drawn}) > 10


LAYER = {"name": "a", "kind": "Linear", "shapes": [[3, 2]], "forward_ms": 1.0, "backward_ms": 2.0}


def test_a_profile_with_wrong_numbers_or_without_time_is_refused(tmp_path: Path):
    file = tmp_path / "mine.json"
    for layers, sentence in (
        ([LAYER | {"shapes": [[64, 3, 11.5]]}], "layers.0.shapes.0.2: Input should be a valid integer"),
        ([LAYER | {"shapes": [[2**40, 2**40]]}], "no parameters or too many"),
        ([LAYER | {"backward_ms": float("nan")}], "layers.0.backward_ms: Input should be a finite number"),
        ([], "it has no parameters or too many, or no layer that takes"),
    ):
        file.write_text(json.dumps({"model": "mine", "source": "me", "layers": layers}))
        refuses(rf"mine.json is not a layer profile \(.*{sentence}", load_profile, str(file))
