"""What every engine owes the training loop: any wire, any collective, any ranks that average their gradients.

`ci` tries every pair of choices, the first tier every other case of those on two to four ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples.own_engine import by_pairs
from imagenet_fast import sync as engines
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.parallel.ddp import GradientSync, attach
from imagenet_fast.recipe.sync_table import Cast, Codes, Collective, Fusion, Wire
from imagenet_fast.sync import Declaration, EngineSettings, GradientPool, SyncEngine, declare
from imagenet_fast.sync.all_reduce import wire_dtype
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.topology import Topology
from tests.conftest import tiers
from tests.covering import covering
from tests.ranks import lending, run, with_ranks
from tests.sync.given import Given, applied, integers, means, normals, pooled, process_groups
from tests.sync.loops import LINK, synced, unmeasured

TOLERANCE = {"fp32": 1e-6, "bf16": 1.5e-2, "fp16": 2e-3, "int8": 1.5e-2}
CODED = {"int8": 2e-2}  # of the largest gradient
STEPS = 2  # the first teaches the pool the order of its gradients
LEARNT = 8  # five more for an engine that learns, and one for what it has learnt

Policy = Literal["by-type", "by-size"]
Name = Literal["allreduce", "ring", "lazy", "hybrid", "dear", "sparse", "powersgd", "auto", "by pairs", "ddp"]
ENGINES: tuple[Name, ...] = get_args(Name)[:-2]
WIRES: tuple[Wire, ...] = get_args(Wire)
CASTS: tuple[Cast, ...] = get_args(Cast)
POLICIES: tuple[Policy, ...] = get_args(Policy)
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
FUSIONS: tuple[Fusion, ...] = (0.0, 0.0005, math.inf, "auto")
SERVERS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
OF_THEIR_OWN = ("ring", "auto", "by pairs", "ddp")
"""Engines that have a collective of their own."""


@dataclass(frozen=True)
class Place:
    """Who averages gradients with whom."""

    world: int
    ranks_per_node: int
    groups: tuple[tuple[int, ...], ...] = ()
    """Which ranks have a pool together, if not all of them."""

    def __str__(self) -> str:
        return f"{self.world} by {self.ranks_per_node}" + (f" in {len(self.groups)} groups" if self.groups else "")


PLACES = (
    *(Place(world, n) for world in range(1, 9) for n in (1, 2, 3) if world % n == 0),
    Place(3, 1, ((0, 1), (1, 2), (2,))),  # overlapping
    Place(4, 1, ((0, 1), (2, 3))),
    Place(4, 2, ((0, 2), (1, 3))),
    Place(5, 2, ((0, 1, 3, 4),)),  # one rank is none of it
    Place(6, 3, ((0, 2, 5), (1, 3, 4))),
    Place(8, 2, ((0, 1, 4, 5), (2, 3, 6, 7))),
)
FEW = tuple(place for place in PLACES if 2 <= place.world <= 4 and str(place) not in ("3 by 3", "4 by 1"))
OTHERS = tuple(place for place in PLACES if place not in FEW)


@dataclass(frozen=True)
class Case:
    """What a pool is given to do."""

    place: Place
    engine: Name
    wire: Wire
    collective: Collective = "native"
    fusion: Fusion = math.inf
    servers: int = 1
    dtype: torch.dtype = torch.float32
    policy: Policy = "by-type"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rest = f"{self.fusion} MiB-{self.servers} servers-{dtype}-{self.policy}"
        return f"{self.engine}-{self.wire}-{self.collective}-{self.place}-{rest}"


def settings_of(case: Case) -> EngineSettings | Declaration | engines.DdpSync:
    wire, fusion, by_size = case.wire, case.fusion, case.policy == "by-size"
    ways: dict[str, Any] = {"wire": wire, "collective": case.collective}
    served: dict[str, Any] = ways | {"servers": case.servers}
    match case.engine:
        case "allreduce":
            return engines.AllReduceSync(**served)
        case "ring":
            return engines.RingSync(wire=wire, bucket_mb=fusion)
        case "lazy":
            return engines.LazySync(**served, threshold_mb=fusion)
        case "hybrid":
            small, large = case.collective, COLLECTIVES[COLLECTIVES.index(case.collective) - 1]
            return engines.HybridSync(
                wire=wire, policy=case.policy, fuse_mb=fusion, small=small, large=large, servers=case.servers
            )
        case "dear":
            dear = declare(engines.DearSync(wire=wire, bucket_mb=fusion))
            return replace(dear, collective=case.collective, servers=case.servers)
        case "sparse":
            when: Any = "lazy" if by_size else "hybrid"
            return engines.SparseSync(**ways, sparsity=0.0, chunk=64, threshold_mb=fusion, timing=when)
        case "powersgd":  # of a rank at which nothing becomes smaller
            return engines.PowerSgdSync(**ways, rank=64, timing="allreduce" if by_size else "dear")
        case "auto":
            return engines.AutoSync(wire=wire)
        case "by pairs":
            return by_pairs(wire)
        case "ddp":
            return engines.DdpSync(wire=wire)


def pairs(places: Sequence[Place]) -> list[Case]:
    """Every pair of choices. Sparse and PowerSGD have chunks and factors, and casts for codes."""
    casts = cycle(CASTS)
    rows = covering(places, ENGINES, WIRES, COLLECTIVES, FUSIONS, SERVERS, DTYPES, POLICIES)
    cases = [Case(*row) for row in rows]
    return [
        replace(case, wire=next(casts)) if case.engine in ("sparse", "powersgd") and case.wire in get_args(Codes)
        else case for case in cases
    ]  # fmt: skip


COVERED = [
    *pairs(FEW),
    *(Case(Place(3, 1), "by pairs", wire) for wire in WIRES),
    *(Case(Place(2, 1), "ddp", wire) for wire in CASTS),
]
FIRST = [case for number, case in enumerate(COVERED) if (number + number // len(ENGINES)) % 2 == 0]
"""Every other one, of each engine."""
FIRST_TIER = sorted(
    {(case.engine, case.wire, None if case.engine in OF_THEIR_OWN else case.collective) for case in FIRST}, key=str
)
"""Of the first tier, each kind of engine (ours, DDP and one of a user's own), wire and collective that meet."""


@pytest.mark.parametrize(
    "case", tiers(FIRST, [*COVERED, *pairs(OTHERS), Case(Place(1, 1), "by pairs", "bf16")]), ids=str
)
def test_parameters_are_updated_with_the_mean(case: Case):
    by_rank = run(case.place.world, average, case, case.place.world <= 3)
    for ranks in {ranks for results in by_rank for ranks in results}:
        assert len({results[ranks] for results in by_rank if ranks in results}) == 1, f"{ranks} differ in a bit"


def average(case: Case, learning: bool) -> dict[tuple[int, ...], str]:
    """What became of this rank's parameters, by group. Where engines learn not, they are given a plan."""
    with unmeasured(), _topologies(case.place) as topologies:
        return {topology.ranks: _in_a_group(case, topology, learning) for topology in topologies}


@contextmanager
def _topologies(place: Place) -> Iterator[list[Topology]]:
    """Of those groups that this rank is in; the others do something else."""
    if not place.groups:
        yield [lending(place.ranks_per_node)]
        return
    device = torch.get_default_device()
    with process_groups(*place.groups) as groups:
        mine = [group for group, ranks in zip(groups, place.groups, strict=True) if dist.get_rank() in ranks]
        topologies = [Topology(device, group, place.ranks_per_node) for group in mine]
        yield topologies
        for topology in topologies:
            topology.close()


def _in_a_group(case: Case, topology: Topology, learning: bool) -> str:
    model, settings = Given(*LAYERS).to(case.dtype), settings_of(case)
    if isinstance(settings, engines.DdpSync):
        forward, sync = attach(model, settings)
        return _digest(model, forward, sync, topology.ranks, case)
    pool = GradientPool(model, settings if learning else _planned(settings), topology=topology)
    try:
        steps = LEARNT if learning or case.engine == "auto" else STEPS
        return _digest(model, model, pool, topology.ranks, case, steps)
    finally:
        pool.close()


def _planned(settings: EngineSettings | Declaration) -> EngineSettings | Callable[[GradientBuffer], SyncEngine]:
    """With a plan at once, where the engine makes one."""
    if isinstance(settings, engines.SparseSync | engines.AutoSync):
        return settings
    engine = settings if isinstance(settings, Declaration) else declare(settings)

    def build(pool: GradientBuffer) -> SyncEngine:
        rising = tuple(1e-3 * number for number in range(len(pool.slots)))
        timing = Timing(rising[::-1], len(rising) * 1e-3, rising, len(rising) * 1e-3)
        return Scheduler(engine, pool, NetworkProbe(pool.topology, wire_dtype(engine.wire), LINK), timing)

    return build


LAYERS = (((2, 3, 3, 3), (1,)), ((17,), ()), ((45, 37),))
SHAPES = [shape for shapes in LAYERS for shape in shapes]


def _digest(
    model: Given, forward: nn.Module, sync: GradientSync, ranks: tuple[int, ...], case: Case, steps: int = STEPS
) -> str:
    """Of all gradients that parameters were updated with, which are the means over ``ranks``: to the bit, where those
    are integers and the wire has no codes."""
    digest = hashlib.sha256()
    coded = CODED.get(case.wire, 0.0) if len(ranks) > 1 else 0.0
    tolerance = max(TOLERANCE[case.wire], TOLERANCE["bf16"] if case.dtype == torch.bfloat16 else 0.0)
    if (case.wire, case.dtype) == ("fp32", torch.float64):
        tolerance = 1e-14  # it is sent as it is
    for step in range(steps):
        whole = step % 2 == 1
        everyone = {
            rank: integers(SHAPES, step, rank, len(ranks)) if whole else normals(SHAPES, step, rank) for rank in ranks
        }
        moved, stats = applied(sync, forward, everyone[dist.get_rank()])
        of_dtype = [[gradient.to(case.dtype) for gradient in of_one] for of_one in everyone.values()]
        for param, mean in zip(model.weights, means(of_dtype), strict=True):
            near = 0.0 if whole and not coded else tolerance
            away = near + coded * 8.0 * len(ranks)  # random ones come with what codes missed of integers
            torch.testing.assert_close(moved[param].double(), mean, rtol=near, atol=away, msg=f"{case}, step {step}")
            digest.update(moved[param].double().cpu().numpy().tobytes())
    assert model.frozen.grad is None
    if len(ranks) == 1:
        assert stats.sent_bytes == 0
    else:
        assert stats.sent_bytes > 0
        assert stats.launches > 0
    assert stats.exposed is None or stats.exposed.seconds() >= 0
    return digest.hexdigest()


@with_ranks(3)
def test_process_groups_that_a_user_makes_beside_are_not_disturbed() -> None:
    """A pool of two of three ranks makes process groups; so does everybody, before, meanwhile and after."""
    inside, place = dist.get_rank() in (0, 2), Place(3, 1)
    dear, lazy = Case(place, "dear", "fp32", fusion=0.0), Case(place, "lazy", "fp32")
    with process_groups((0, 2), (0, 1, 2)) as (pair, _):
        if inside:
            model = Given(*LAYERS)
            pool = pooled(model, engines.DearSync(wire="fp32", bucket_mb=0.0), group=pair)
            _digest(model, model, pool, (0, 2), dear)
        for number in range(2):
            total = torch.tensor(dist.get_rank())
            with process_groups((0, 1, 2)) as (everybody,):
                dist.all_reduce(total, group=everybody)
            assert total == 3
            if inside:
                assert pool.topology.size == 2
                _digest(model, model, pool, (0, 2), dear, 1 + number)
        model = Given(*LAYERS)
        _digest(model, model, pooled(model, engines.LazySync(wire="fp32", collective="pairwise")), (0, 1, 2), lazy)


NAMED: dict[str, EngineSettings | Declaration | engines.DdpSync] = {
    "allreduce fused": engines.AllReduceSync(fused=True),
    "by pairs": by_pairs("fp32"),
    "ddp": engines.DdpSync(),
}


PIECES = [("lazy", "bf16"), ("allreduce", "fp32"), ("dear", "bf16"), ("hybrid", "fp32"), ("sparse", "fp16")]


@pytest.mark.parametrize(("engine", "wire"), tiers([("lazy", "bf16"), ("hybrid", "fp32")], PIECES))
@with_ranks(3)
@unmeasured()
def test_what_is_longer_than_a_piece_is_averaged_in_pieces(engine: Name, wire: Wire) -> None:
    """In three parts, so that no piece is cut where a power of two would."""
    shapes = [(1, 1000), (450, 1001), (7,)]
    model = Given(*([shape] for shape in shapes))
    settings = settings_of(Case(Place(3, 1), engine, wire, "pairwise"))
    pool = pooled(model, settings, topology=lending(1))
    for step in range(2):
        everyone = [integers(shapes, step, rank, 3) for rank in range(3)]
        moved, stats = applied(pool, model, everyone[dist.get_rank()])
        assert all(torch.equal(moved[p].double(), mean) for p, mean in zip(model.weights, means(everyone), strict=True))
    assert stats.launches > 1 or engine == "sparse", "sparse fuses chunks to its own threshold"


@pytest.mark.parametrize("name", NAMED)  # of all others programs tell
@with_ranks(2)
def test_micro_steps_add_up(name: str) -> None:
    model = Given(*LAYERS)
    forward, sync = synced(model, NAMED[name])
    everyone = [[integers(SHAPES, micro, rank, 2) for micro in range(3)] for rank in range(2)]
    expected = means([[sum(parts) for parts in zip(*of_one, strict=True)] for of_one in everyone])
    for _ in range(2):  # the second step must not see the first
        moved, _ = applied(sync, forward, *everyone[dist.get_rank()])
        assert all(torch.equal(moved[p].double(), mean) for p, mean in zip(model.weights, expected, strict=True))


FUSED = [(0.0, "fp32", 5), (0.0002, "fp32", 3), (0.0002, "bf16", 2), (math.inf, "fp32", 1)]


@pytest.mark.parametrize(("threshold", "wire", "launches"), FUSED)
@with_ranks(2)
def test_lazy_fuses_until_its_threshold(threshold: float, wire: Wire, launches: int) -> None:
    model = Given(*LAYERS)
    pool = pooled(model, engines.LazySync(wire=wire, threshold_mb=threshold))
    _, stats = applied(pool, model, integers(SHAPES, 0, 0, 2))
    assert stats.sent_bytes == pool.gradients.values.numel() * wire_dtype(wire).itemsize, (
        "2 (2-1)/2 of the pool by each of two"
    )
    assert stats.launches == launches, stats.launches
