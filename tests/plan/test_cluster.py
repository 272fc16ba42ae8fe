"""Clusters: shipped ones are valid, wrong ones get one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagenet_fast.cost_model.layer_profile import load_profile, save_profile
from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.devices import DEVICES, find_device
from imagenet_fast.recipe.load import shipped
from tests.conftest import refusal_of

GOOD = """
source = "a test"
nodes = 4
gpus_per_node = 8
device = "v100"
[nic]
gbit = 25
[inside]
gb_per_s = 130
"""


def written(folder: Path, old: str = "", new: str = "") -> str:
    file = folder / "mine.toml"
    file.write_text(GOOD.replace(old, new))
    return str(file)


def test_shipped_clusters_and_ones_own_name_a_device_and_the_kind_of_each_value(tmp_path: Path):
    for name in shipped("cluster"):
        cluster = load_cluster(name)
        assert cluster.device in DEVICES
        assert cluster.kinds
        assert set(cluster.kinds.values()) <= {"measured", "published", "assumed"}, name
    assert load_cluster(written(tmp_path)).nic.efficiency == (0.8, 0.9, 0.95)


WRONG = [
    ("gbit = 25", "gbit = -25", "nic.gbit is -25: input should be greater than or equal to 0.000001; correct it"),
    ("gbit = 25", "gbit = 25\nspeed = 2", "unknown key nic.speed; the keys here are gbit, count"),
    ("gbit = 25", "gbit = 25\nefficiency = [0.9, 0.8, 1]", "nic.efficiency: its numbers are low, used, high"),
    ("nodes = 4", 'nodes = 4\n"a\\nb" = 1', "unknown key 'a\\nb'; the keys here are name, source"),
    ("[inside]", "[stragglers]\nsigma = [0, 0, 1e308]\n[inside]", "stragglers.sigma.2 is 1e+308: input"),
    ("[nic]", '[kinds]\n"nic.speed" = "assumed"\n[nic]', "\"nic.speed\": input should be 'nodes', 'nic.gbit'"),
]


def test_wrong_clusters_get_one_sentence(tmp_path: Path):
    for old, new, sentence in WRONG:
        told = refusal_of(load_cluster, written(tmp_path, old, new))
        assert told.startswith("mine.toml: ")
        assert sentence in told
        assert "\n" not in told
    assert "gone.toml; there are abci, cloud-25g" in refusal_of(load_cluster, "gone.toml")


def test_what_is_unknown_is_asked_for_where_it_matters(tmp_path: Path):
    cluster = load_cluster(written(tmp_path, "gbit = 25", 'gbit = "unknown"'))
    cluster.network(8)
    assert "nic.gbit is unknown" in refusal_of(cluster.network, 16)
    cluster.with_nics(10).network(16)


def test_unknown_devices_and_models_are_refused():
    assert "device 'abacus' is not known; there are v100" in refusal_of(find_device, "abacus", None, "launched")
    for device, model, sentence in (
        ("v100", "resnet18", "device v100 has no step times of resnet18, only of alexnet, alexnet_bn, resn"),
        ("v100", "cifarnet", "plan cannot predict cifarnet, only alexnet, alexnet_bn, resnet50, resnet18"),
    ):
        assert sentence in refusal_of(DEVICES[device].compute, model)


def test_a_recorded_profile_is_a_device_of_its_own_model_and_image_size(tmp_path: Path):
    file = tmp_path / "mine.json"
    profile = replace(load_profile("resnet50"), model="resnet18", pixels=160).scaled_to(0.2)
    save_profile(load_profile("resnet50"), tmp_path / "other.json")
    other = find_device(str(tmp_path / "other.json"), 128, "launched")
    assert "has no step times of alexnet, only of resnet50" in refusal_of(other.compute, "alexnet")
    save_profile(profile, file)
    assert "write the images of its step as device_batch" in refusal_of(find_device, str(file), None, "launched")
    device = find_device(str(file), 100, "launched")
    assert device.layers("resnet18").model == "resnet18"
    compute = device.compute("resnet18")
    assert (compute.seconds(100, 160), compute.kind) == (pytest.approx(0.2, rel=1e-3), "measured")
    assert compute.seconds(100, 320) == pytest.approx(4 * 0.2, rel=1e-3)
    save_profile(replace(profile, batch=100, fixed=0.25, memory_gb=80.0), file)
    device = find_device(str(file), None, "launched")
    assert device.compute("resnet18").seconds(200, 160) == pytest.approx(0.05 + 2 * 0.15, rel=1e-3)
    assert device.memory_gb == 80.0
