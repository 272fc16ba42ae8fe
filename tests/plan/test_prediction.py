"""Predicted steps: the same messages and bytes as the engines', and sensible in every direction; stragglers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest

from imagenet_fast.bench.comm_volume import bench_count
from imagenet_fast.cost_model.collectives import RankLayout, piece_bytes, wire_format
from imagenet_fast.cost_model.layer_profile import load_profile
from imagenet_fast.cost_model.messages import divide
from imagenet_fast.plan.cluster import Input, load_cluster
from imagenet_fast.plan.network import StatedNetwork, expected_max
from imagenet_fast.plan.prediction import (
    MODEL_ERROR,
    Planned,
    Scaling,
    planned_engines,
    planned_slots,
    predict_step,
    situation_of,
)
from imagenet_fast.plan.report import verdict
from imagenet_fast.recipe.load import load_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import DdpSync, LazySync, Sync
from imagenet_fast.recipe.sync_table import Collective, Wire
from imagenet_fast.sync import declare
from imagenet_fast.sync.all_reduce import wire_dtype
from imagenet_fast.sync.bucket_scheduler import step_model
from imagenet_fast.sync.network_benchmark import NetworkProbe
from tests.bench.small import SMALL
from tests.conftest import refusal_of, tiers
from tests.sync.test_step_prediction import pooled

ENGINES = planned_engines(None)


def by_engine(
    gpus: int, gbit: float | None = None, engines: str | None = None, recipe: Recipe | None = None,
    cluster: str = "gradientflow-v", scaling: Scaling = "weak",
) -> dict[str, Planned]:  # fmt: skip
    machine = load_cluster(cluster, "published")
    machine = machine if gbit is None else machine.with_nics(gbit)
    rows = situation_of(recipe or load_recipe("alexnet-512gpu"), machine, gpus, scaling).rows(planned_engines(engines))
    return {f"{row.engine} {row.wire}": row for row in rows}


@pytest.mark.parametrize("settings", ENGINES, ids=lambda settings: f"{settings.kind}-{settings.wire}")
def test_messages_are_those_of_the_engine(settings: Sync):
    """Slot by slot, on four CPU hosts, as ``auto`` predicts them on a pool."""
    profile = load_profile("alexnet").downscaled(4)
    pool, _ = pooled(profile, hosts=4)
    engine = declare(settings)  # type: ignore[arg-type]
    layout = RankLayout((1,) * 4, on_gpu=False)
    links = StatedNetwork(layout, 1e9)
    network = NetworkProbe(pool.topology, wire_dtype(engine.wire), links.link("ring"))
    for fuse in (2.0**20, math.inf):
        theirs = step_model(engine, pool, network).messages(fuse)
        slots = planned_slots(profile, pool.alignment)
        ours = divide(engine, slots, pool.alignment, layout, wire_format(settings.wire), fuse, links)
        assert [(m.part, m.collective, m.half, m.task.event) for m in ours] == [
            (m.part, m.collective, m.half, m.task.event) for m in theirs
        ]
        assert [m.task.message for m in ours] == pytest.approx([m.task.message for m in theirs], rel=2e-3)


COLLECTIVES, WIRES = get_args(Collective), get_args(Wire)
COUNTED = [
    *((collective, 4, 4, "bf16") for collective in COLLECTIVES), ("hierarchical", 4, 4, "fp32"), ("ring", 4, 4, "int8"),
]  # fmt: skip
MORE = [*product(COLLECTIVES, (8,), (8,), ("bf16",)), *product(COLLECTIVES, (4,), (4,), WIRES)]


@pytest.mark.parametrize(("collective", "nodes", "each", "wire"), tiers(COUNTED, MORE))
def test_bytes_are_those_that_bench_sync_counts(collective: Collective, nodes: int, each: int, wire: Wire):
    settings, layout = LazySync(wire=wire, threshold_mb=math.inf, collective=collective), RankLayout((each,) * nodes)
    (counted,) = bench_count(SMALL, [settings], [layout.size], each, "56gbit")
    planned = predict_step(settings, SMALL.scaled_to(0.1), StatedNetwork(layout, 7e9))
    assert planned.nic_bytes == pytest.approx(counted.nic_bytes, rel=0.04)


@pytest.mark.parametrize("ranks", [16, 120])
def test_padding_of_codes_is_not_sent_and_codes_go_as_16_bits_inside_a_node(ranks: int):
    """The line of 120 ranks is 15 360 values, and ResNet-50 has many gradients of 64."""
    step, layout = load_profile("resnet50").scaled_to(0.001), RankLayout((8,) * (ranks // 8))
    networks = StatedNetwork(layout, 7e9), StatedNetwork(layout, 1e12, inside_bytes_per_s=1e9)
    (plain, slow), (coded, coded_slow) = (
        [predict_step(LazySync(wire=wire), step, network) for network in networks] for wire in ("bf16", "int8")
    )
    assert coded.nic_bytes == pytest.approx(plain.nic_bytes / 2, rel=0.02)
    assert coded_slow.step_s >= 0.95 * slow.step_s, "8-bit wires gain nothing where the node's own links are slower"


def test_on_one_node_a_single_server_is_slower_than_a_ring():
    network = StatedNetwork(RankLayout((8,)), 1.0, 8e9)
    ring, server = (network.seconds(name, 1e8) for name in ("native", "parameter_server"))
    assert ring == pytest.approx(2 * 7 / 8 * 1e8 / 8e9, rel=0.02)
    assert server == pytest.approx(7 * 1e8 / 8e9, rel=0.02), "it sends all to seven others"


def test_nccls_algorithm_is_that_of_the_typical_rate():
    """A tree is faster for 16 MiB on a fast NIC, and slower for long messages; a better rate changes no algorithm."""
    slow = StatedNetwork(RankLayout((8,) * 8), 5e9, 1e11)
    fast = replace(slow, nic_bytes_per_s=5e10)
    kept = replace(fast, typical_bytes_per_s=5e9)
    assert fast.link("native").latency_s < slow.link("native").latency_s, "a tree, and a ring"
    assert kept.link("native").latency_s == slow.link("native").latency_s
    assert kept.seconds("native", 1e9) < fast.seconds("native", 1e9)


def grown(*sizes: tuple[float, int], pixels: int = 160, multiple: int = 0, **input: float) -> Planned:
    """ResNet-50 on 8 A100 for 10 epochs."""
    recipe, machine = load_recipe("resnet50-8gpu"), load_cluster("dgx-a100", "published")
    data = recipe.data.model_copy(update={"image_size": pixels, "sizes": sizes, "size_multiple": multiple})
    recipe = recipe.model_copy(update={"data": data, "epochs": 10})
    machine = machine.model_copy(update={"input": Input(**input)})
    return situation_of(recipe, machine, 8, "weak").rows(planned_engines("lazy"))[0]


def test_growing_images_are_predicted_epoch_by_epoch():
    small, large = (grown(pixels=pixels) for pixels in (128, 288))
    mean = grown((1, 128), (6, 288))
    assert mean.compute_s == pytest.approx((small.compute_s + large.compute_s) / 2)
    assert grown((1, 128), (20, 288)).compute_s == pytest.approx(small.compute_s), "of epochs that there are"
    ramp = grown((1, 128), (6, 288), multiple=32)
    assert mean.compute_s < ramp.compute_s, "it is larger within the first epochs"
    fed = {"images_per_s": 3200 / ((small.step_s + large.step_s) / 2)}
    waits = grown((1, 128), (6, 288), **fed)
    assert waits.train_s == pytest.approx((mean.train_s + large.train_s) / 2, rel=1e-3), (
        "small images wait, large do not"
    )


def test_the_hosts_pace_is_a_floor_of_launched_steps():
    compute = load_cluster("dgx-h200").gpu.compute("resnet50")
    assert compute.seconds(128) == pytest.approx(0.0302, rel=1e-3)
    assert (compute.seconds(8), compute.kind) == (pytest.approx(0.0266), "measured")
    assert load_cluster("dgx-h200", "published").gpu.compute("resnet50").seconds(8) < 0.005
    assert load_cluster("dgx-a100").gpu.compute("resnet50").kind == "assumed"


def test_ddp_has_a_small_first_bucket_only_by_default():
    usual, asked = (declare(DdpSync(bucket_cap_mb=cap)) for cap in (None, 25))
    assert (usual.first_bucket_scale, asked.first_bucket_scale) == (1 / 25, 1.0)
    assert usual.bucket_bytes == asked.bucket_bytes


def test_more_bandwidth_never_hurts_and_bands_hold_the_value():
    slow, fast = by_engine(512, 25.0), by_engine(512, 100.0)
    for name, row in slow.items():
        assert fast[name].step_s <= 1.01 * row.step_s, "of sizes within 1 % it takes the one with fewer launches"
        for each in (row, fast[name]):
            assert 0 < each.efficiency_low <= each.efficiency <= each.efficiency_high <= 1
            assert each.step_s >= each.compute_s


def test_more_gpus_take_longer_a_step_and_less_to_train():
    few, some, many = (by_engine(gpus, engines="dear,lazy,sparse") for gpus in (64, 512, 4096))
    for name, row in few.items():
        assert some[name].step_s >= row.step_s
        assert some[name].train_s < row.train_s
    assert many["dear bf16"].efficiency > some["dear bf16"].efficiency - 0.03, "its halves still overlap"


def test_strong_scaling_keeps_the_batch_and_refuses_one_that_does_not_divide():
    rows = [by_engine(gpus, engines="lazy", scaling="strong")["lazy bf16"] for gpus in (256, 512)]
    assert [row.gpus * row.batch for row in rows] == [65536, 65536]
    assert rows[0].steps == rows[1].steps
    assert "does not divide over 24 ranks" in refusal_of(by_engine, 24, scaling="strong")


def test_one_gpu_sends_nothing():
    for row in by_engine(1).values():
        assert (row.nic_bytes, row.efficiency) == (0, pytest.approx(1))


def test_pieces_grow_with_the_ranks_up_to_a_limit():
    for on_gpu, expected in ((True, [16, 16, 32, 32]), (False, [1, 4, 32, 32])):
        assert [piece_bytes(RankLayout((8,) * nodes, on_gpu)) / 2**20 for nodes in (2, 8, 64, 512)] == expected
    # Between CPUs of one node they are long: each piece costs the time of a core that trains.
    assert [piece_bytes(RankLayout((ranks,), False)) / 2**20 for ranks in (2, 8, 64, 512)] == [8, 8, 8, 32]


def test_auto_takes_the_fastest_exact_engine_of_ours_and_says_which_the_models_error_cannot_exclude():
    by_name = by_engine(512)
    dear, rows = by_name["dear bf16"], list(by_name.values())
    assert [row for row in rows if row.chosen] == [dear]
    assert all(row.step_s >= dear.step_s for row in rows if row.ours)
    assert verdict(rows, MODEL_ERROR) == "auto would take dear bf16"
    slower = replace(dear, engine="near", chosen=False, step_s=1.01 * dear.step_s)
    assert "no clear winner: auto would take dear bf16, and near bf16 comes within" in verdict(
        [*rows, slower], MODEL_ERROR
    )


def test_the_mean_of_the_largest_is_that_of_draws_and_of_two_ranks_by_the_formula():
    """Whatever the engine: ranks meet in each step, a deferred one a forward later."""
    for ranks in (2, 8, 64, 1024):
        draws = np.random.default_rng(ranks).standard_normal((2000, ranks)).max(axis=1)
        assert expected_max(ranks) == pytest.approx(draws.mean(), abs=4 * draws.std() / np.sqrt(len(draws))), ranks
    assert expected_max(1) == pytest.approx(0, abs=1e-9)
    assert expected_max(2) == pytest.approx(1 / np.sqrt(np.pi), abs=1e-6)
