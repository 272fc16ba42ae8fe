"""What a step of each engine is predicted to take, on hosts that are not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from random import Random

import pytest
import torch
import torch.distributed as dist

from imagenet_fast import sync
from imagenet_fast.bench.replay import gradients_of, replay, timing_of, with_moves
from imagenet_fast.cost_model.collectives import piece_bytes
from imagenet_fast.cost_model.layer_profile import Layer, Profile, Timing, load_profile, random_profile
from imagenet_fast.cost_model.step_simulator import THRESHOLDS, CodecCost, LinkModel, step_lower_bound
from imagenet_fast.recipe.sync_config import DdpSync, Sync
from imagenet_fast.sync import Engine, GradientPool, LazySync, declare
from imagenet_fast.sync.bucket_scheduler import step_model
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.topology import Topology
from tests.conftest import tiers
from tests.ranks import with_ranks

OURS: tuple[Sync, ...] = (
    sync.AllReduceSync(wire="bf16"), sync.RingSync(), sync.LazySync(), sync.HybridSync(), sync.DearSync(),
    sync.SparseSync(), sync.HybridSync(policy="by-size"), sync.LazySync(wire="fp32", threshold_mb=0),
    sync.LazySync(collective="parameter_server"),
)  # fmt: skip
USUAL: tuple[Sync, ...] = (*OURS[:6], DdpSync(wire="bf16"))


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
    return pool, timing_of(profile, model, pool.slots)


def predicted(profile: Profile, engines: Sequence[Sync | Engine], link: LinkModel, hosts: int = 4) -> dict[str, float]:
    """By kind, or by place."""
    pool, timing = pooled(profile, hosts)
    seconds = {}
    for number, settings in enumerate(engines):
        engine = settings if isinstance(settings, Engine) else declare(settings)
        share, name = getattr(settings, "share", 1.0), getattr(settings, "kind", f"{number}")
        network = NetworkProbe(pool.topology, engine.wire, link)
        seconds[name] = step_model(engine, pool, engine.wire, network, share).best(timing)[1]
    return seconds


def link_of(raw_s: float, profile: Profile) -> LinkModel:
    """Of an undisturbed all-reduce of all gradients in bf16 that takes ``raw_s``, with gloo's latency on a veth."""
    return LinkModel(3e-3, raw_s / (2 * profile.elements))


ALEXNET = load_profile("alexnet").downscaled(4).scaled_to(1.409)
ALEXNETS_LINK = link_of(1.534, ALEXNET)
"""Of four hosts of 250 Mbit/s, as measured on 22 November 2026."""


def transformer(blocks: int = 24) -> Profile:
    """A large first layer, whose gradients are ready last and needed first, and equal blocks behind it."""
    first = Layer("embedding", "Embedding", ((10_870, 256),), 19.0, 38.0)
    rest = (Layer(f"blocks.{n}", "Linear", ((670, 670), (670,)), 19.0, 38.0) for n in range(blocks))
    return Profile("transformer", "by hand", (first, *rest))


MEASURED: dict[str, tuple[Profile, int, float, float, dict[str, float]]] = {
    "alexnet": (ALEXNET, 4, 1.409, 1.534, {
        "allreduce": 3.023, "ring": 2.022, "lazy": 2.023, "hybrid": 1.607, "dear": 1.622, "sparse": 1.475, "ddp": 2.207,
    }),
    "alexnet, quick": (ALEXNET, 4, 0.180, 1.534, {"ddp": 1.645, "hybrid": 1.542}),
    "alexnet on three": (ALEXNET, 3, 1.407, 1.364, {
        "ddp": 2.040, "ring": 1.847, "hybrid": 1.469, "dear": 1.505, "sparse": 1.438,
    }),
    "alexnet on five": (load_profile("alexnet").downscaled(5), 5, 1.407, 1.636, {
        "ddp": 2.306, "lazy": 2.140, "hybrid": 1.789, "dear": 1.734, "sparse": 1.454,
    }),
    "resnet50, fast": (load_profile("resnet50").downscaled(8), 4, 1.533, 0.080, {
        "ddp": 1.612, "ring": 1.566, "lazy": 1.570, "hybrid": 1.564, "dear": 1.574,
    }),
    "resnet50": (load_profile("resnet50").downscaled(8), 4, 1.545, 0.641, {
        "ddp": 2.135, "ring": 1.606, "lazy": 1.565, "hybrid": 1.566, "dear": 1.618,
    }),
    "transformer": (transformer(), 4, 1.423, 1.362, {"sparse": 1.520, "lazy": 1.889, "ring": 1.889, "ddp": 2.473}),
    "transformer, again": (transformer(), 4, 1.444, 1.361, {"hybrid": 1.785, "dear": 1.824}),
    "two thirds ready last and needed first": (load_profile("random:7"), 4, 1.021, 1.340, {
        "lazy": 2.014, "dear": 1.953, "ddp": 2.321,
    }),
}  # fmt: skip
"""What was measured on 21 and 22 November 2026: hosts, seconds of compute and of an all-reduce, and of each step."""


@pytest.mark.parametrize("name", MEASURED)
def test_steps_take_what_was_measured(name: str):
    profile, hosts, compute_s, raw_s, measured = MEASURED[name]
    profile = profile.scaled_to(compute_s)
    engines = [engine for engine in USUAL if engine.kind in measured]
    assert predicted(profile, engines, link_of(raw_s, profile), hosts) == pytest.approx(measured, rel=0.05)


def test_ddp_in_fp32_and_every_step_of_the_ladder_take_what_was_measured():
    whole, half = torch.float32, torch.bfloat16
    steps = ((whole, "each", "native"), (whole, "each", "ring"), (half, "each", "ring"), (half, "backward", "ring"))
    engines = [Engine(wire, awaits, bucket_bytes=0, collective=collective) for wire, awaits, collective in steps]
    rungs = predicted(ALEXNET, [*engines, DdpSync()], ALEXNETS_LINK)
    assert list(rungs.values()) == pytest.approx([4.545, 4.559, 3.039, 2.037, 3.694], rel=0.05)


def test_hybrid_is_near_its_limit_where_much_is_ready_last_and_needed_first():
    profile = load_profile("random:7").scaled_to(1.021)
    least = step_lower_bound(profile.timing, profile.all_reduce_seconds(1.340), "read")
    hybrid = predicted(profile, [sync.HybridSync()], link_of(1.340, profile))["hybrid"]
    assert least < hybrid < 1.04 * least, "its two collectives do not share the wire at the end of backward"


def test_pieces_go_two_abreast_and_halves_wait_for_a_latency_more():
    """Of a first layer of eleven pieces on a wire that takes no time, and gloo, which carries two of them."""
    profile = transformer()

    def step_s(latency_s: float) -> dict[str, float]:
        return predicted(profile, [sync.HybridSync(), sync.DearSync()], LinkModel(latency_s, 1e-12))

    none, some = step_s(0.0), step_s(0.05)
    waited = {name: some[name] - none[name] for name in none}
    assert waited == pytest.approx({"hybrid": 6 * 0.05, "dear": 7 * 0.05}, rel=1e-3)


@pytest.mark.parametrize("hosts", tiers([3], [2, 3, 4, 7]))
def test_no_engine_is_predicted_below_its_limit(hosts: int):
    for seed in range(4):
        chance = Random(seed + 100 * hosts)
        profile = random_profile(seed)
        pool, timing = pooled(profile, hosts)
        raw = chance.uniform(0.05, 3) * profile.compute_s
        link = LinkModel(chance.choice([0.0, 3e-3]), raw / profile.elements)  # a byte an element
        for settings in OURS:
            engine = declare(settings)  # type: ignore[arg-type]
            network = NetworkProbe(pool.topology, engine.wire, link)
            _, step_s = step_model(engine, pool, engine.wire, network, settings.share).best(timing)
            least = step_lower_bound(
                profile.timing, profile.all_reduce_seconds(engine.wire.itemsize * raw), settings.awaits, settings.share
            )
            assert step_s >= 0.999 * least, (seed, settings)


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
            steps = [step_model(engine, pool, torch.float32, network).step_s(size, timing) for size in sizes]
            best, step_s = step_model(engine, pool, torch.float32, network).best(timing)
            assert best in sizes
            assert step_s <= 1.01 * min(steps)
    if not engine.prioritized:
        dear = NetworkProbe(pool.topology, torch.float32, LinkModel(1e-3, 1e-9, call_s=1.0))
        assert step_model(engine, pool, torch.float32, dear).best(timing)[0] == math.inf


def test_eight_bits_pay_where_the_wire_is_slower_than_their_codec():
    pool, timing = pooled(ALEXNET, 4)
    hybrid = declare(sync.HybridSync())

    def step_s(wire: torch.dtype, link: LinkModel, encode: float) -> float:
        network = NetworkProbe(pool.topology, wire, link, codecs={torch.int8: CodecCost(encode, encode)})
        return step_model(hybrid, pool, wire, network).best(timing)[1]

    fast = LinkModel(3e-3, ALEXNETS_LINK.s_per_byte / 100)
    for slow_codec in (0.0, 1e-8):
        assert step_s(torch.int8, ALEXNETS_LINK, slow_codec) < 0.95 * step_s(torch.bfloat16, ALEXNETS_LINK, slow_codec)
    assert step_s(torch.int8, ALEXNETS_LINK, 0.0) < 1.04 * ALEXNET.compute_s
    assert step_s(torch.int8, fast, 1e-7) > step_s(torch.bfloat16, fast, 1e-7)


def test_a_prediction_needs_no_process_group():
    """None of the others can have made one: there is nothing to make it of."""
    assert not dist.is_initialized()
    pool, timing = pooled(transformer(), 512)
    for settings in OURS:
        engine = declare(settings)  # type: ignore[arg-type]
        network = NetworkProbe(pool.topology, engine.wire, LinkModel(1e-4, 1e-9))
        step_model(engine, pool, engine.wire, network).best(timing)
    assert not pool.topology._streams


@with_ranks(1)
def test_pooling_gradients_prolongs_backward() -> None:
    profile = random_profile(3).downscaled(64)
    gradients = gradients_of(profile)
    model = replay(profile, gradients)
    pool = GradientPool(model, LazySync()).gradients
    course = timing_of(profile, model, pool.slots)
    moved = with_moves(course, gradients, pool)
    late = [after - before for before, after in zip(course.ready, moved.ready, strict=True)]
    assert late[0] > 0
    assert late == sorted(late)
    assert moved.backward_s == pytest.approx(course.backward_s + late[-1])
    assert (moved.needed, moved.forward_s) == (course.needed, course.forward_s)
    given = dict(zip(model.parameters(), chain.from_iterable(gradients), strict=True))
    for slot in pool.slots:
        assert torch.equal(pool.values[slot.start : slot.flag], given[slot.param].flatten()), slot.name
