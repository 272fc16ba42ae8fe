"""What a step of each engine is predicted to take, on hosts that are not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import pytest
import torch

from imagenet_fast import sync
from imagenet_fast.bench.replay import gradients_of, replay, with_moves
from imagenet_fast.cost_model.collectives import piece_bytes
from imagenet_fast.cost_model.layer_profile import Layer, Profile, Timing, load_profile, random_profile
from imagenet_fast.cost_model.step_simulator import THRESHOLDS, CodecCost, LinkModel, step_lower_bound
from imagenet_fast.recipe.sync_config import DdpSync, Sync
from imagenet_fast.sync import Declaration, GradientPool, LazySync, declare
from imagenet_fast.sync.all_reduce import wire_dtype
from imagenet_fast.sync.bucket_scheduler import step_model
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.topology import Topology
from tests.conftest import tiers
from tests.ranks import with_ranks


class Hosts(Topology):
    """Nodes of one rank each, of which none is there."""

    def __init__(self, count: int) -> None:
        super().__init__(torch.device("cpu"))
        self.ranks = tuple(range(count))
        self.size = count
        self.nodes = tuple((rank,) for rank in self.ranks)


def pooled(profile: Profile, hosts: int) -> tuple[GradientBuffer, Timing]:
    """A profile's layers without their values."""
    shapes = [[torch.empty(shape, device="meta") for shape in layer.shapes] for layer in profile.layers]
    model = replay(profile, shapes)
    pool = GradientPool(model, LazySync()).gradients
    pool.topology = Hosts(hosts)
    return pool, profile.timing


def predicted(profile: Profile, engines: Sequence[Sync | Declaration], link: LinkModel) -> dict[str, float]:
    """By kind, or by place."""
    pool, timing = pooled(profile, hosts=4)
    seconds = {}
    for number, settings in enumerate(engines):
        engine = settings if isinstance(settings, Declaration) else declare(settings)
        network = NetworkProbe(pool.topology, wire_dtype(engine.wire), link)
        seconds[getattr(settings, "kind", f"{number}")] = step_model(engine, pool, network).best(timing)[1]
    return seconds


def link_of(raw_s: float, profile: Profile) -> LinkModel:
    """Of an undisturbed all-reduce of all gradients in bf16 that takes ``raw_s``, with gloo's latency on a veth."""
    return LinkModel(3e-3, raw_s / (2 * profile.elements))


ALEXNET = load_profile("alexnet").downscaled(4).scaled_to(1.409)
ALEXNETS_LINK = link_of(1.534, ALEXNET)
"""Of four hosts of 250 Mbit/s, as measured on 22 November 2026."""


def test_ddp_in_fp32_and_every_step_of_the_ladder_take_what_was_measured():
    whole, half = "fp32", "bf16"
    steps = ((whole, "each", "native"), (whole, "each", "ring"), (half, "each", "ring"), (half, "backward", "ring"))
    engines = [Declaration(wire, awaits, bucket_bytes=0, collective=collective) for wire, awaits, collective in steps]
    rungs = predicted(ALEXNET, [*engines, DdpSync()], ALEXNETS_LINK)
    assert list(rungs.values()) == pytest.approx([4.545, 4.559, 3.039, 2.037, 3.694], rel=0.05)


def test_hybrid_is_near_its_limit_where_much_is_ready_last_and_needed_first():
    profile = load_profile("random:7").scaled_to(1.021)
    least = step_lower_bound(profile.timing, profile.all_reduce_seconds(1.340), "read")
    hybrid = predicted(profile, [sync.HybridSync()], link_of(1.340, profile))["hybrid"]
    assert least < hybrid < 1.04 * least, "its two collectives do not share the wire at the end of backward"


def test_pieces_go_two_abreast_and_halves_wait_for_a_latency_more():
    """Of a first layer of eleven pieces, whose gradients are ready last and needed first, with equal blocks behind it,
    on a wire that takes no time, and gloo, which carries two of them."""
    first = Layer("embedding", "Embedding", ((10_870, 256),), 19.0, 38.0)
    rest = (Layer(f"blocks.{n}", "Linear", ((670, 670), (670,)), 19.0, 38.0) for n in range(24))
    profile = Profile("transformer", "by hand", (first, *rest))

    def step_s(latency_s: float) -> dict[str, float]:
        return predicted(profile, [sync.HybridSync(), sync.DearSync()], LinkModel(latency_s, 1e-12))

    none, some = step_s(0.0), step_s(0.05)
    waited = {name: some[name] - none[name] for name in none}
    assert waited == pytest.approx({"hybrid": 6 * 0.05, "dear": 7 * 0.05}, rel=1e-3)


@pytest.mark.parametrize(
    "settings", tiers([sync.LazySync(wire="fp32")], [sync.DearSync(wire="fp32")]), ids=lambda s: s.kind
)
def test_the_best_threshold_is_never_worse_than_none_or_all(settings: sync.LazySync | sync.DearSync):
    engine = declare(settings)
    pool, timing = pooled(ALEXNET, 4)
    sizes = [size for size in THRESHOLDS if not engine.prioritized or size >= piece_bytes(pool.topology.layout)]
    for latency_s in (0.0, 1e-3, 0.1):
        for s_per_byte in (1e-9, 1e-7):
            network = NetworkProbe(pool.topology, torch.float32, LinkModel(latency_s, s_per_byte))
            steps = [step_model(engine, pool, network).step_s(size, timing) for size in sizes]
            best, step_s = step_model(engine, pool, network).best(timing)
            assert best in sizes
            assert step_s <= 1.01 * min(steps)
    if not engine.prioritized:
        dear = NetworkProbe(pool.topology, torch.float32, LinkModel(1e-3, 1e-9, call_s=1.0))
        assert step_model(engine, pool, dear).best(timing)[0] == math.inf


def test_eight_bits_pay_where_the_wire_is_slower_than_their_codec():
    pool, timing = pooled(ALEXNET, 4)

    def step_s(wire: str, link: LinkModel, encode: float) -> float:
        network = NetworkProbe(pool.topology, wire_dtype(wire), link)
        network._codecs[torch.int8] = CodecCost(encode, encode)
        return step_model(declare(sync.HybridSync(wire=wire)), pool, network).best(timing)[1]

    fast = LinkModel(3e-3, ALEXNETS_LINK.s_per_byte / 100)
    for slow_codec in (0.0, 1e-8):
        assert step_s("int8", ALEXNETS_LINK, slow_codec) < 0.95 * step_s("bf16", ALEXNETS_LINK, slow_codec)
    assert step_s("int8", ALEXNETS_LINK, 0.0) < 1.04 * ALEXNET.compute_s
    assert step_s("int8", fast, 1e-7) > step_s("bf16", fast, 1e-7)


@with_ranks(1)
def test_pooling_gradients_prolongs_backward() -> None:
    profile = random_profile(3).downscaled(64)
    gradients = gradients_of(profile)
    model = replay(profile, gradients)
    pool = GradientPool(model, LazySync()).gradients
    moved = with_moves(course := profile.timing, gradients, pool)
    late = [after - before for before, after in zip(course.ready, moved.ready, strict=True)]
    assert late[0] > 0
    assert late == sorted(late)
    assert moved.backward_s == pytest.approx(course.backward_s + late[-1])
    assert (moved.needed, moved.forward_s) == (course.needed, course.forward_s)
    given = dict(zip(model.parameters(), chain.from_iterable(gradients), strict=True))
    for slot in pool.slots:
        assert torch.equal(pool.values[slot.start : slot.flag], given[slot.param].flatten()), slot.name
