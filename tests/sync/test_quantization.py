"""Wires of 8 bits: what codes say, what they miss, and that nothing is lost of it."""

from __future__ import annotations

import copy
import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.sync import AutoSync, DearSync, EngineSettings, GradientPool, HybridSync, LazySync
from imagenet_fast.sync.quantization import BLOCK, PLAIN, ErrorFeedback, Packer, decode, encode
from tests.conftest import tiers
from tests.ranks import lending, run, with_ranks
from tests.sync.given import Given, applied, pooled, same_on_ranks
from tests.sync.loops import unmeasured

CPU = torch.device("cpu")


def code(values: Tensor, left: Tensor | None) -> Tensor:
    """What arrives of ``values``."""
    scales, codes = torch.empty(len(values), dtype=PLAIN), torch.empty(values.shape, dtype=torch.int8)
    encode(values, scales, codes, left)
    return decode(scales, codes)


def test_what_a_code_misses_is_exactly_what_it_leaves_behind():
    torch.manual_seed(1)
    for size in (1e-30, 1e-3, 1.0, 1e6, 1e30):
        values = size * torch.randn(7, BLOCK)
        left = torch.full_like(values, math.pi)
        arrived = code(values, left)
        assert torch.equal(arrived.double() + left.double(), values.double())
        assert ((arrived - values).abs() <= 0.51 / 127 * values.abs().amax(1, keepdim=True)).all()


def test_blocks_of_nothing_and_of_next_to_nothing_arrive_as_nothing():
    values = torch.stack([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-42)])
    left = torch.ones_like(values)
    assert torch.equal(code(values, left), torch.zeros_like(values))
    assert torch.equal(left, values)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_arrives_so_and_leaves_no_trace(wrong: float):
    values, before = torch.randn(3, BLOCK), torch.randn(3, BLOCK)
    values[1, 7] = wrong
    left = before.clone()
    arrived = code(values, left)
    assert not arrived[1].isfinite().any()
    assert torch.equal(left[1], before[1])
    assert torch.equal(arrived[[0, 2]] + left[[0, 2]], values[[0, 2]])


def test_all_own_equally_many_blocks_however_slots_are_filled_up():
    layers = nn.Sequential(*(nn.Linear(64, 256, bias=n % 3 == 0) for n in range(40)))
    pool = GradientPool(layers, LazySync()).gradients
    pool.align_slots(16 * BLOCK)
    blocks = ErrorFeedback(pool.slots, CPU, {}).blocks(slice(0, pool.slots[-1].stop))
    values = [int(of_kind.sum()) for of_kind in blocks.kinds]
    assert values == [40 * 32, 40 + 14]
    for owners in (1, 3, 16, 64):
        packing = Packer(blocks, owners, CPU)
        codes, plain = (-(-count // owners) for count in values)
        gap = packing.width - codes * (2 + BLOCK) - plain * 2 * BLOCK
        assert 0 <= gap < 16
        assert packing.width % 16 == 0, "NCCL moves byte by byte what begins elsewhere"


LAYERS = (((100, 60), (100,)), ((100,), (100,)), ((70, 100), (70,)), ((5, 3, 3, 3), (5,)))
"""Of several blocks and a rest, of less than a block, norms and biases."""


class Steps:
    """A loop whose gradients are integers, and what its updates came to."""

    def __init__(self, settings: EngineSettings, ranks_per_node: int = 1) -> None:
        self.model = Given(*LAYERS)
        self.pool = pooled(self.model, settings, topology=lending(ranks_per_node))
        self.applied = {p: torch.zeros_like(p) for p in self.model.weights}
        self.given = {p: torch.zeros_like(p) for p in self.model.weights}
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def take(self, steps: int) -> Steps:
        for _ in range(steps):
            gradients = [torch.randint(-50, 50, p.shape, generator=self.random).float() for p in self.given]
            moved, _ = applied(self.pool, self.model, gradients)
            for param, gradient in zip(self.given, gradients, strict=True):
                self.given[param] += gradient
                self.applied[param] += moved[param]
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.pool.engine.state_dict())

    @property
    def lost(self) -> float:
        """Of all gradients of all ranks, what was neither applied nor left behind; at most, in one value."""
        kept = self.pool.engine.state_dict()["kept"]
        lost = 0.0
        for slot in self.pool.slots:
            total = self.given[slot.param].clone()
            dist.all_reduce(total)
            behind = kept[slot.name]["residual"].view_as(total).clone()
            dist.all_reduce(behind)
            missing = total - dist.get_world_size() * self.applied[slot.param] - behind
            lost = max(lost, float(missing.abs().max()))
        return lost

    @property
    def whole(self) -> Tensor:
        """All that was applied."""
        return torch.cat([applied.flatten() for applied in self.applied.values()])


COLLECTIVES: tuple[Collective, ...] = ("pairwise", "hierarchical")
QUICK = [(4, 1, "pairwise"), (4, 2, "hierarchical"), (3, 1, "pairwise")]
CASES = [case for case in product((3, 4), (1, 2), COLLECTIVES) if case[0] % case[1] == 0]


@pytest.mark.parametrize(("world", "ranks_per_node", "collective"), tiers(QUICK, CASES))
@with_ranks()
def test_all_ranks_apply_the_same_and_what_travels_together_changes_no_bit(
    world: int, ranks_per_node: int, collective: Collective
) -> None:
    """3 steps; of two or four ranks nothing is lost of integers to the bit, since halves and quarters round nothing."""
    alone, together = (
        Steps(LazySync(wire="int8", threshold_mb=fuse, collective=collective), ranks_per_node).take(3)
        for fuse in (0.0, math.inf)
    )
    inside = ranks_per_node > 1 and collective == "hierarchical"
    if world == 4 and not inside:
        assert alone.lost == together.lost == 0.0
    assert torch.equal(alone.whole, together.whole)
    same_on_ranks(alone.whole)


PLANNING = {
    "lazy": LazySync(wire="int8"), "hybrid": HybridSync(wire="int8"), "dear": DearSync(wire="int8"),
    "auto": AutoSync(wire="int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", tiers(["hybrid"], PLANNING))
@with_ranks(4)
@unmeasured()
def test_an_engine_that_plans_loses_nothing_when_messages_change(name: str) -> None:
    steps = Steps(PLANNING[name]).take(10)
    assert steps.lost == 0.0
    assert any(own["residual"].any() for own in steps.pool.engine.state_dict()["kept"].values())


def test_a_rank_alone_keeps_what_several_have_left():
    """For the time when there are several again, as in an elastic job."""
    run(1, _alone_again, run(2, _state_of_two)[0])


@unmeasured()
def _alone_again(state: dict[str, Any]) -> None:
    steps = Steps(LazySync(wire="int8"))
    steps.pool.engine.load_state_dict(state)
    after = steps.take(2).state()
    assert after["step"] == state["step"] + 2
    assert after["kept"].keys() == state["kept"].keys()
    assert all(torch.equal(after["kept"][name]["residual"], own["residual"]) for name, own in state["kept"].items())
    assert any(own["residual"].any() for own in state["kept"].values())


@unmeasured()
def _state_of_two() -> dict[str, Any]:
    return Steps(LazySync(wire="int8")).take(3).state()


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_residual_that_ranks_of_a_node_share_survives_saving_to_the_bit(ranks: int):
    """It is saved in the units of one rank, and held in those of the node's mean: thirds, fifths, sevenths."""
    gradients = GradientPool(nn.Linear(BLOCK, 64), LazySync()).gradients
    gradients.align_slots(BLOCK)
    slots = gradients.slots
    whole = slice(0, slots[-1].stop)
    before = ErrorFeedback(slots, CPU, {})
    Packer(before.blocks(whole), 2, CPU, ranks)
    rows = before._pieces[0][1]
    rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    after = ErrorFeedback(slots, CPU, before.by_name())
    after.sum_shared(ranks, lambda _: None)  # the other ranks of the node hold zeros where this one holds rows
    Packer(after.blocks(whole), 2, CPU, ranks)
    real = before._pieces[0][2]
    assert torch.equal(after._pieces[0][1][real], rows[real])
