"""What every engine owes the training loop: any wire, any collective, any ranks that average their gradients.

The suite tries every pair of choices; `pytest -m full` tries every engine x wire x collective x place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from typing import Literal, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.own_engine import by_pairs
from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.cost_model import layer_profile
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.engine_table import Cast, Collective, Fusion, Wire
from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    Engine,
    EngineSettings,
    GradientPool,
    GradientSync,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    SyncEngine,
    attach,
    build_engine,
    declare,
)
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.engines import wire_dtype
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.topology import Topology
from tests.covering import covering
from tests.ranks import run
from tests.sync.loops import unmeasured

WIRES: tuple[Wire, ...] = get_args(Wire)
TOLERANCE = {"fp32": 1e-6, "bf16": 1.5e-2, "fp16": 2e-3}
CODES: dict[str, float] = {"int8": 2e-2, "fp8": 0.1}  # of the largest gradient
LINK = LinkModel(1e-4, 1e-8)
STEPS = 2  # the first teaches the pool the order of its gradients
LEARNT = 8  # five more for an engine that learns, and one for what it has learnt


Policy = Literal["by-type", "by-size"]
Name = Literal["allreduce", "ring", "lazy", "hybrid", "dear", "sparse", "powersgd", "auto", "by pairs"]
ENGINES: tuple[Name, ...] = get_args(Name)
POLICIES: tuple[Policy, ...] = get_args(Policy)
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
FUSIONS: tuple[Fusion, ...] = (0.0, 0.0005, math.inf, "auto")
SERVERS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Place:
    """Who averages gradients with whom."""

    world: int
    ranks_per_node: int
    groups: tuple[tuple[int, ...], ...] = ()
    """Which ranks have a pool together, if not all of them."""


PLACES = (
    *(Place(world, n) for world in range(1, 9) for n in (1, 2, 3) if world % n == 0),
    Place(3, 1, ((0, 1), (1, 2), (2,))),  # overlapping
    Place(4, 1, ((0, 1), (2, 3))),
    Place(4, 2, ((0, 2), (1, 3))),
    Place(5, 2, ((0, 1, 3, 4),)),  # one rank is none of it
    Place(6, 3, ((0, 2, 5), (1, 3, 4))),
    Place(8, 2, ((0, 1, 4, 5), (2, 3, 6, 7))),
)
FEWER = tuple(place for place in PLACES if place.world not in (6, 7))
"""What the suite has time for."""


@dataclass(frozen=True)
class Case:
    """What a pool is given to do."""

    place: Place
    engine: Name
    wire: Wire
    collective: Collective
    fusion: Fusion
    servers: int = 1
    dtype: torch.dtype = torch.float32
    policy: Policy = "by-type"


def settings_of(case: Case) -> EngineSettings | Engine:
    wire, collective, fusion, servers = case.wire, case.collective, case.fusion, case.servers
    other = COLLECTIVES[COLLECTIVES.index(collective) - 1]
    match case.engine:
        case "allreduce":
            return AllReduceSync(wire=wire, collective=collective, servers=servers)
        case "ring":
            return RingSync(wire=wire, bucket_mb=fusion)
        case "lazy":
            return LazySync(wire=wire, threshold_mb=fusion, collective=collective, servers=servers)
        case "hybrid":
            return HybridSync(
                wire=wire, policy=case.policy, fuse_mb=fusion, small=collective, large=other, servers=servers
            )
        case "dear":
            return replace(declare(DearSync(wire=wire, bucket_mb=fusion)), collective=collective, servers=servers)
        case "sparse":
            when: Literal["lazy", "hybrid"] = "lazy" if case.policy == "by-size" else "hybrid"
            return SparseSync(
                wire=wire, sparsity=0.0, chunk=64, threshold_mb=fusion, timing=when, collective=collective
            )
        case "powersgd":  # of a rank at which nothing becomes smaller
            timing: Literal["allreduce", "dear"] = "allreduce" if case.policy == "by-size" else "dear"
            return PowerSgdSync(wire=wire, rank=64, timing=timing, collective=collective)
        case "auto":
            return AutoSync(wire=wire)
        case "by pairs":
            return by_pairs(wire_dtype(wire))


class Layer(nn.Module):
    """Parameters whose gradients are, whatever their values, what ``forward`` is given."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            self.register_parameter(f"param{number}", nn.Parameter(torch.zeros(shape).to(memory_format=memory)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


LAYERS = (((2, 3, 3, 3), (1,)), ((17,), ()), ((45, 37),))


class Sizes(nn.Module):
    """Layers of awkward shapes, called in another order than they are registered in."""

    def __init__(self, layers: Sequence[Sequence[tuple[int, ...]]] = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*shapes) for shapes in layers)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        given = iter(gradients)
        parts = [[next(given) for _ in layer.parameters()] for layer in self.layers]
        return torch.stack([self.layers[n](parts[n]) for n in reversed(range(len(parts)))]).sum()

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.layers.parameters())


SHAPES = [shape for shapes in LAYERS for shape in shapes]


def gradients_of(
    rank: int, step: int, integers: bool, ranks: int, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    """Of a rank; integers are such that their means over as many ``ranks``, or a part of them, are integers that 16
    bits hold."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank)
    if integers:
        return [ranks * torch.randint(-8, 8, shape, generator=generator).float() for shape in shapes]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@cache
def means_of(ranks: tuple[int, ...], step: int, integers: bool, dtype: torch.dtype) -> list[Tensor]:
    """In float64."""
    everyone = [gradients_of(rank, step, integers, len(ranks)) for rank in ranks]
    return [torch.stack(parts).to(dtype).double().mean(0) for parts in zip(*everyone, strict=True)]


def suite() -> list[Case]:
    """Every pair of choices; our own engine has none but the wire."""
    rows = covering(FEWER, ENGINES[:-1], WIRES, COLLECTIVES, FUSIONS, SERVERS, DTYPES, POLICIES)
    own = [Case(Place(world, 1), "by pairs", wire, "pairwise", math.inf) for world in (1, 3, 4) for wire in WIRES]
    return [*(Case(*row) for row in rows), *own]


def everything() -> Iterator[Case]:
    """Every engine x wire x collective x place; the rest takes turns."""
    turns = cycle(product(POLICIES, DTYPES, SERVERS, FUSIONS))
    for place, engine, wire, collective in product(PLACES, ENGINES, WIRES, COLLECTIVES):
        if engine not in ("ring", "auto", "by pairs") or collective == "native":  # they have one of their own
            yield Case(place, engine, wire, collective, *reversed(next(turns)))


@pytest.mark.parametrize("world", sorted({place.world for place in FEWER}))
def test_after_its_update_every_parameter_has_moved_by_the_mean(world: int):
    _ranks_agree(run(world, _every_engine))


@pytest.mark.ci
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_every_engine_collective_and_wire(world: int):
    """A power of two or not, on one level or two; other numbers of ranks go by pairs."""
    _ranks_agree(run(world, _full_product))


def _ranks_agree(by_rank: list[dict[object, str]]) -> None:
    for key in {key for results in by_rank for key in results}:
        assert len({results[key] for results in by_rank if key in results}) == 1, f"ranks differ in a bit: {key}"


def _every_engine() -> dict[object, str]:
    """Up to three ranks learn as they do in life; more are given a plan, for a step of theirs takes long here."""
    world = dist.get_world_size()
    results = _in_their_groups(suite(), learning=world <= 3)
    ranks = tuple(range(world))
    for wire in get_args(Cast) if world <= 3 else ():
        model = Sizes()
        results["ddp", wire] = _digest(model, *attach(model, DdpSync(wire=wire)), wire, torch.float32, ranks, STEPS)
    return results


def _full_product() -> dict[object, str]:
    return _in_their_groups(everything(), learning=False)


def _in_their_groups(cases: Iterable[Case], learning: bool) -> dict[object, str]:
    """By case and group: what became of this rank's parameters. Channels of a place are made once."""
    rank, everybody = dist.get_rank(), tuple(range(dist.get_world_size()))
    own = [place for place in PLACES if place.world == len(everybody)]
    groups = {ranks: dist.new_group(list(ranks)) for place in own for ranks in place.groups}
    topologies = {
        (place, ranks): Topology(torch.get_default_device(), groups.get(ranks), place.ranks_per_node, lends=True)
        for place in own
        for ranks in place.groups or (everybody,)
        if rank in ranks  # the others do something else
    }
    results: dict[object, str] = {}
    for case in cases:
        for (place, ranks), topology in topologies.items():
            if case.engine in ("sparse", "powersgd") and case.wire in CODES:
                continue  # they have chunks and factors, not codes
            if case.place == place:
                results[case, ranks] = _in_a_group(case, topology, learning)
    return results


def _in_a_group(case: Case, topology: Topology, learning: bool) -> str:
    model, settings = Sizes().to(case.dtype), settings_of(case)
    pool = GradientPool(model, topology=topology)
    with unmeasured():
        try:
            pool.attach(build_engine(settings, pool) if learning else _planned(settings, pool))
            learns = case.engine == "auto" or (learning and settings.learns)
            return _digest(model, model, pool, case.wire, case.dtype, topology.ranks, LEARNT if learns else STEPS)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{case}, rank {dist.get_rank()}") from error
        finally:
            pool.close()


def _planned(settings: EngineSettings | Engine, pool: GradientPool) -> SyncEngine:
    """With a plan at once, where the engine makes one."""
    if isinstance(settings, SparseSync | AutoSync):
        return build_engine(settings, pool)
    engine = settings if isinstance(settings, Engine) else declare(settings)
    rising = tuple(1e-3 * number for number in range(len(pool.slots)))
    timing = Timing(rising[::-1], len(rising) * 1e-3, rising, len(rising) * 1e-3)
    return Scheduler(engine, pool, NetworkProbe(pool.topology, engine.wire, LINK), timing)


def _digest(
    model: Sizes, forward: nn.Module, sync: GradientSync, wire: Wire, dtype: torch.dtype, ranks: tuple[int, ...],
    steps: int,
) -> str:  # fmt: skip
    """Of all gradients that parameters were updated with, which are the means over ``ranks``."""
    digest = hashlib.sha256()
    cast = "bf16" if wire in CODES or dtype == torch.bfloat16 else wire
    coded = CODES.get(wire, 0.0) if len(ranks) > 1 else 0.0
    tolerance = max(TOLERANCE[cast], TOLERANCE[wire] if cast != wire and wire not in CODES else 0.0)
    applied: dict[nn.Parameter, Tensor] = {}

    def keep(params: list[nn.Parameter]) -> None:
        for param in params:
            assert param not in applied, "updated twice"
            assert param.grad is not None
            assert param.grad.stride() == param.stride()
            applied[param] = param.grad.clone()

    for step in range(steps):
        integers = step % 2 == 1
        applied.clear()
        sync.zero_grad()
        forward(gradients_of(dist.get_rank(), step, integers, len(ranks))).backward()
        stats = sync.end_backward()
        sync.update(keep)
        sync.settle()
        for param, mean in zip(model.weights, means_of(ranks, step, integers, dtype), strict=True):
            near = 0.0 if integers and not coded else tolerance
            away = near + coded * 8.0 * len(ranks)  # random ones come with what codes missed of integers
            torch.testing.assert_close(applied[param].double(), mean, rtol=near, atol=away, msg=f"step {step}")
            digest.update(applied[param].double().cpu().numpy().tobytes())
    assert model.frozen.grad is None
    if len(ranks) == 1:
        assert stats.sent_bytes == stats.received_bytes == 0
    else:
        assert stats.sent_bytes + stats.received_bytes > 0
        assert stats.launches > 0
    assert stats.exposed is None or stats.exposed.seconds() >= 0
    return digest.hexdigest()


def test_an_engine_of_ones_own_is_measured_beside_the_others():
    rows = bench_sync(
        PROFILE, [("by pairs", by_pairs(torch.bfloat16)), LazySync()], hosts=2, ranks_per_host=1, rate=None, scale=1,
        rounds=1, steps=1,
    )  # fmt: skip
    assert [(row.engine, row.wire) for row in rows] == [("by pairs", "bf16"), ("lazy", "bf16"), ("ddp", "bf16")]
    own = rows[0]
    assert own.launches == 2 * 2, "two halves of each of two pairs"
    assert own.sent_bytes == pytest.approx(2 * PROFILE.elements, rel=0.05)  # two ranks send half of all, and then half
    lazy = rows[1]
    assert max(own.compute_s, own.raw_s) <= own.limit_s <= lazy.limit_s, "it may await a layer until it is read"
    assert own.predicted_s >= PROFILE.compute_s


PROFILE = layer_profile.Profile(
    "small",
    "made up for a test",
    tuple(layer_profile.Layer(f"{n}", "Linear", ((40, 100), (40,)), 0.5, 1.0) for n in range(4)),
)


def test_what_a_user_does_beside_is_not_disturbed():
    run(3, _beside)


def _beside() -> None:
    """A pool of two of three ranks makes process groups; so does everybody, before, meanwhile and after."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    everybody = tuple(range(3))
    if rank in (0, 2):
        model = Sizes()
        pool = GradientPool(model, pair)
        pool.attach(build_engine(DearSync(wire="fp32", bucket_mb=0.0), pool))
        _digest(model, model, pool, "fp32", torch.float32, (0, 2), 2)
    for number in range(2):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=dist.new_group(list(everybody)))
        assert total == 3
        if rank in (0, 2):
            assert pool.topology.size == 2
            _digest(model, model, pool, "fp32", torch.float32, (0, 2), 1 + number)
    model = Sizes()
    _, sync = attach(model, LazySync(wire="fp32", collective="pairwise"))
    _digest(model, model, sync, "fp32", torch.float32, everybody, 2)


def test_a_model_may_have_two_pools_of_other_ranks():
    """What all ranks share, and what two of them share, as experts or shards of a model are."""
    run(4, _two_pools)


def _two_pools() -> None:
    rank, world = dist.get_rank(), (0, 1, 2, 3)
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 2), (1, 3))}
    own = next(pair for pair in pairs if rank in pair)
    for settings in (
        AllReduceSync(wire="fp32"),
        AllReduceSync(wire="fp32", fused=True),
        LazySync(wire="fp32", threshold_mb=0.0005, collective="pairwise"),
        HybridSync(wire="fp32", fuse_mb=0.0005),
        DearSync(wire="fp32", bucket_mb=0.0),
    ):
        model = Sizes()
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        shared, apart = (
            [(name, p) for name, p in model.named_parameters() if p.requires_grad and ("layers.2" in name) is one]
            for one in (False, True)
        )
        pools = [GradientPool(shared, model=model), GradientPool(apart, pairs[own], model=model)]
        for pool in pools:
            pool.attach(build_engine(settings, pool))
        for step in range(8):
            applied: dict[nn.Parameter, Tensor] = {}
            for pool in pools:
                pool.zero_grad()
            model(gradients_of(rank, step, True, 4)).backward()
            for pool in pools:
                pool.end_backward()
            for pool in pools:
                pool.update(lambda params, applied=applied: applied.update((p, p.grad.clone()) for p in params))
            for pool in pools:
                pool.settle()
            ours, theirs = (_means(ranks, step) for ranks in (world, own))
            for name, param, all_ranks, two_ranks in zip(names, model.weights, ours, theirs, strict=True):
                mean = two_ranks if "layers.2" in name else all_ranks
                assert torch.equal(applied[param], mean), (settings, step, name)
        for pool in pools:
            pool.close()


def _means(ranks: tuple[int, ...], step: int) -> list[Tensor]:
    everyone = [gradients_of(rank, step, True, 4) for rank in ranks]
    return [torch.stack(parts).mean(0) for parts in zip(*everyone, strict=True)]


def test_what_is_longer_than_a_piece_is_averaged_in_pieces():
    run(3, _long)


def _long() -> None:
    """In three parts, so that no piece is cut where a power of two would."""
    shapes = [(1, 1000), (4500, 1001), (7,)]
    for name, wire in (
        ("lazy", "bf16"),
        ("allreduce", "fp32"),
        ("dear", "bf16"),
        ("hybrid", "fp32"),
        ("sparse", "fp16"),
    ):
        case = Case(Place(3, 1), name, wire, "pairwise", math.inf)
        model = Sizes([[shape] for shape in shapes])
        _, sync = attach(model, settings_of(case))
        with unmeasured():
            for step in range(2):
                sync.zero_grad()
                model(gradients_of(dist.get_rank(), step, True, 3, shapes)).backward()
                grads, launches = _applied(sync)
                everyone = [gradients_of(rank, step, True, 3, shapes) for rank in range(3)]
                for param, *parts in zip(model.weights, *everyone, strict=True):
                    assert torch.equal(grads[param], torch.stack(parts).mean(0)), (case, step)
        assert launches > 1 or name == "sparse", "sparse fuses chunks to its own threshold"
        sync.close()


def test_accumulation_unused_and_shared_parameters():
    run(2, _awkward_models)


def _awkward_models() -> None:
    rank = dist.get_rank()
    for settings in (
        AllReduceSync(),
        LazySync(wire="fp32", threshold_mb=0),
        LazySync(wire="fp32", threshold_mb=1),
        RingSync(wire="fp32", bucket_mb=1),
        HybridSync(wire="fp32", fuse_mb=1),
        DearSync(wire="fp32", bucket_mb=1),
        SparseSync(wire="fp32", sparsity=0.0, chunk=4),
        SparseSync(wire="fp32", sparsity=0.0, chunk=4, timing="hybrid"),
        PowerSgdSync(wire="fp32", rank=64),
        by_pairs(torch.float32),
    ):
        _accumulates(settings, rank)
        _survives_an_unused_layer(settings, rank)
        _adds_up_a_shared_weight(settings, rank)
    _accumulates(DdpSync(), rank)


def _accumulates(settings: EngineSettings | DdpSync | Engine, rank: int) -> None:
    model = Sizes()
    forward, sync = attach(model, settings)
    for _ in range(2):  # the second step must not see the first
        sync.zero_grad()
        for micro_step in range(2):
            with sync.no_sync():
                forward(gradients_of(rank, micro_step, True, 2)).backward()
        forward(gradients_of(rank, 2, True, 2)).backward()
        grads, _ = _applied(sync)
        for i, param in enumerate(model.weights):
            mean = sum(gradients_of(r, s, True, 2)[i] for r in range(2) for s in range(3)) / 2
            assert torch.equal(grads[param], mean), settings
    sync.close()


def _survives_an_unused_layer(settings: EngineSettings | Engine, rank: int) -> None:
    """A different layer is idle on each rank, and in each step."""
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
    _, sync = attach(model, settings)
    for step in range(3):
        sync.zero_grad()
        used = [layer for i, layer in enumerate(model) if i != (rank + step) % 3]
        sum(layer(torch.ones(1, 3)).sum() for layer in used).backward()
        grads, _ = _applied(sync)
        for i, layer in enumerate(model):
            users = sum(i != (r + step) % 3 for r in range(2))
            assert torch.equal(grads[layer.weight], torch.full((3, 3), users / 2)), (settings, step)
    sync.close()


def _adds_up_a_shared_weight(settings: EngineSettings | Engine, rank: int) -> None:
    layer = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(layer, layer)
    nn.init.eye_(layer.weight)
    _, sync = attach(model, settings)
    sync.zero_grad()
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    # 2 uses, of 1 and of 2, averaged
    assert torch.equal(_applied(sync)[0][layer.weight], torch.full((3, 3), 3.0)), settings
    sync.close()


def _applied(sync: GradientSync) -> tuple[dict[nn.Parameter, Tensor], int]:
    """End the step; the gradients that parameters were updated with, and in how many messages they came, or, where
    they are awaited later, those before them."""
    grads: dict[nn.Parameter, Tensor] = {}
    stats = sync.end_backward()
    sync.update(lambda params: grads.update((p, p.grad.clone()) for p in params))
    sync.settle()
    return grads, stats.launches


def test_lazy_fuses_until_its_threshold():
    run(2, _counts_launches)


def _counts_launches() -> None:
    for threshold, wire in ((0.0, "fp32"), (0.0005, "fp32"), (0.0005, "bf16"), (math.inf, "fp32")):
        model = Sizes()
        pool = GradientPool(model)
        pool.attach(build_engine(LazySync(wire=wire, threshold_mb=threshold), pool))
        pool.zero_grad()
        model(gradients_of(0, 0, True, 2)).backward()
        stats = pool.end_backward()
        message = pool.buffer.numel() * (4 if wire == "fp32" else 2)
        assert stats.sent_bytes == message, "two ranks send 2 (2-1)/2 of the pool each"
        match threshold:
            case 0.0:
                assert stats.launches == len(SHAPES)
            case math.inf:
                assert stats.launches == 1
            case _:
                assert 1 < stats.launches <= math.ceil(message / (threshold * 2**20)) + 1
        pool.close()
