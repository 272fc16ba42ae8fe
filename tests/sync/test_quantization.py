"""Wires of 8 bits: what codes say, what they miss, and that nothing is lost of it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.recipe.engine_table import Codes, CodingTable, Collective
from imagenet_fast.sync import AutoSync, DearSync, GradientPool, HybridSync, LazySync, SyncEngine, build_engine
from imagenet_fast.sync.engines import wire_dtype
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.param_slot import slots_of
from imagenet_fast.sync.quantization import BLOCK, PLAIN, ErrorFeedback, Feedback, Packer, decode, encode
from tests.ranks import run
from tests.sync.loops import lending, unmeasured

WIRES = (torch.int8, torch.float8_e4m3fn)
CPU = torch.device("cpu")


def code(values: Tensor, left: Tensor | None, wire: torch.dtype) -> Tensor:
    """What arrives of ``values``."""
    scales, codes = torch.empty(len(values), dtype=PLAIN), torch.empty(values.shape, dtype=wire)
    encode(values, scales, codes, None if left is None else Feedback(left.clone(), left))
    return decode(scales, codes)


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_code_misses_is_exactly_what_it_leaves_behind(wire: torch.dtype):
    torch.manual_seed(1)
    for size in (1e-30, 1e-3, 1.0, 1e6, 1e30):
        values = size * torch.randn(7, BLOCK)
        left = torch.full_like(values, math.pi)
        arrived = code(values, left, wire)
        assert torch.equal(arrived.double() + left.double(), values.double())
        step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 8}[wire]
        assert ((arrived - values).abs() <= 0.51 * step * values.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("wire", WIRES)
def test_blocks_of_nothing_and_of_next_to_nothing_arrive_as_nothing(wire: torch.dtype):
    values = torch.stack([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-42)])
    left = torch.ones_like(values)
    assert torch.equal(code(values, left, wire), torch.zeros_like(values))
    assert torch.equal(left, values)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_arrives_so_and_leaves_no_trace(wire: torch.dtype, wrong: float):
    values, before = torch.randn(3, BLOCK), torch.randn(3, BLOCK)
    values[1, 7] = wrong
    left = before.clone()
    arrived = code(values, left, wire)
    assert not arrived[1].isfinite().any()
    assert torch.equal(left[1], before[1])
    assert torch.equal(arrived[[0, 2]] + left[[0, 2]], values[[0, 2]])


def test_all_own_equally_many_blocks_however_slots_are_filled_up():
    pool = GradientPool(nn.Sequential(*(nn.Linear(64, 256, bias=n % 3 == 0) for n in range(40))))
    pool.align(16 * BLOCK)
    blocks = ErrorFeedback(pool.slots, torch.device("cpu")).blocks(slice(0, pool.slots[-1].stop))
    values = [int(of_kind.sum()) for of_kind in blocks.kinds]
    assert values == [40 * 32, 40 + 14]
    for owners in (1, 3, 16, 64):
        packing = Packer(blocks, owners, torch.int8, torch.device("cpu"))
        codes, plain = (-(-count // owners) for count in values)
        gap = packing.width - codes * (2 + BLOCK) - plain * 2 * BLOCK
        assert 0 <= gap < 16
        assert packing.width % 16 == 0, "NCCL moves byte by byte what begins elsewhere"


class Net(nn.Sequential):
    """Layers of several blocks and a rest, of less than a block, norms and biases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(60, 100), nn.LayerNorm(100), nn.Linear(100, 70), nn.Conv2d(3, 5, 3))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """Every parameter's gradient is what is given."""
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


class Steps:
    """A loop whose gradients are integers, and what its updates came to."""

    def __init__(self, settings: CodingTable, ranks_per_node: int = 1) -> None:
        self.model = Net()
        self.pool = GradientPool(self.model, topology=lending(ranks_per_node))
        self.pool.attach(build_engine(settings, self.pool))  # type: ignore[arg-type]  # one of ours
        self.applied = {p: torch.zeros_like(p) for p in self.model.parameters()}
        self.given = {p: torch.zeros_like(p) for p in self.model.parameters()}
        self._random = torch.Generator().manual_seed(dist.get_rank())

    def take(self, steps: int) -> Steps:
        for _ in range(steps):
            self.pool.zero_grad()
            gradients = [torch.randint(-50, 50, p.shape, generator=self._random).float() for p in self.given]
            self.model(gradients).backward()
            self.pool.end_backward()
            self.pool.update(self._keep)
            self.pool.settle()
            for total, gradient in zip(self.given.values(), gradients, strict=True):
                total += gradient
        return self

    def _keep(self, params: list[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            self.applied[param] += param.grad

    @property
    def engine(self) -> SyncEngine:
        assert self.pool.reducer.engine is not None
        return self.pool.reducer.engine

    @property
    def lost(self) -> float:
        """Of all gradients of all ranks, what was neither applied nor left behind; at most, in one value."""
        left = self.engine.state_dict()["left"]
        left = torch.zeros_like(self.pool.buffer) if left is None else left.clone()
        dist.all_reduce(left)
        lost = 0.0
        for slot in self.pool.slots:
            total = self.given[slot.param].clone()
            dist.all_reduce(total)
            behind = left[slot.start : slot.flag].view_as(total)
            missing = total - dist.get_world_size() * self.applied[slot.param] - behind
            lost = max(lost, float(missing.abs().max()))
        return lost

    def close(self) -> Tensor:
        """All that was applied."""
        self.pool.close()
        return torch.cat([applied.flatten() for applied in self.applied.values()])


CODES: tuple[Codes, ...] = ("int8", "fp8")
COLLECTIVES: tuple[Collective, ...] = ("pairwise", "butterfly", "ring", "native", "parameter_server", "torus2d")


def test_all_ranks_apply_the_same_and_what_travels_together_changes_no_bit():
    for world in (3, 4):
        by_rank = run(world, _every_collective)
        for case, applied in by_rank[0].items():
            assert all(torch.equal(other[case], applied) for other in by_rank), case
            assert torch.equal(applied, by_rank[0][*case[:-1], math.inf]), f"alone or together: {case}"


def _every_collective() -> dict[Any, Tensor]:
    """3 steps; of two or four ranks nothing is lost of integers to the bit, since halves and quarters round nothing."""
    applied: dict[Any, Tensor] = {}
    world = dist.get_world_size()
    for wire, collective, per_node, fuse in product(CODES, COLLECTIVES, (1, 2), (0.0, math.inf)):
        if world % per_node == 0 and (wire == "int8" or collective in ("pairwise", "butterfly")):
            settings = LazySync(wire=wire, threshold_mb=fuse, collective=collective, servers=2)
            steps = Steps(settings, per_node).take(3)
            inside = collective == "torus2d" or (per_node > 1 and collective in ("ring", "butterfly"))
            if world == 4 and not inside and wire == "int8":
                assert steps.lost == 0.0, (wire, collective, per_node, fuse)
            applied[wire, collective, per_node, fuse] = steps.close()
    return applied


def test_engines_that_plan_lose_nothing_when_messages_change():
    run(4, _with_plans)


@unmeasured()
def _with_plans() -> None:
    for settings in (
        LazySync(wire="int8"), HybridSync(wire="int8"), DearSync(wire="int8"), AutoSync(wire="int8"),
        LazySync(wire="int8", bf16_steps=3), DearSync(wire="int8", bf16_steps=9),
    ):  # fmt: skip
        steps = Steps(settings).take(10)
        assert steps.lost == 0.0, settings
        assert steps.engine.state_dict()["left"].any()
        steps.close()


def test_a_run_goes_on_from_its_state_bit_for_bit():
    run(2, _again_from_its_state)


@unmeasured()
def _again_from_its_state() -> None:
    for settings in (LazySync(wire="int8"), HybridSync(wire="fp8"), LazySync(wire="int8", bf16_steps=5)):
        first = Steps(settings).take(3)
        state = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in first.engine.state_dict().items()
        }
        again = Steps(settings)
        again.engine.load_state_dict(state)
        again._random.set_state(first._random.get_state())
        for total, sofar in zip(again.applied.values(), first.applied.values(), strict=True):
            total.copy_(sofar)
        for steps in (first, again):
            steps.take(9)
        assert torch.equal(first.close(), again.close()), settings


def test_the_first_steps_travel_in_16_bits_where_so_wished():
    run(2, _first_in_16_bits)


def _first_in_16_bits() -> None:
    steps = Steps(LazySync(wire="int8", bf16_steps=2)).take(1)
    assert steps.lost == 0.0
    assert steps.engine.state_dict()["left"] is None, "nothing has had a code yet"
    steps.take(2)
    assert steps.engine.state_dict()["left"].any()
    steps.close()


def test_a_rank_alone_sends_nothing_and_rounds_nothing():
    run(1, _alone)


def _alone() -> None:
    steps = Steps(LazySync(wire="int8")).take(2)
    assert all(
        torch.equal(applied, given) for applied, given in zip(steps.applied.values(), steps.given.values(), strict=True)
    )
    assert steps.engine.state_dict() == {}
    steps.close()


def test_a_rank_alone_keeps_what_several_have_left():
    """For the time when there are several again, as in an elastic job."""
    state = run(2, _left_by_two)[0]
    run(1, _alone_between, state)


@unmeasured()
def _left_by_two() -> dict[str, Any]:
    steps = Steps(LazySync(wire="int8", bf16_steps=1)).take(3)
    state = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in steps.engine.state_dict().items()
    }
    steps.close()
    return state


@unmeasured()
def _alone_between(state: dict[str, Any]) -> None:
    steps = Steps(LazySync(wire="int8", bf16_steps=1))
    steps.engine.load_state_dict(state)
    steps.take(2)
    after = steps.engine.state_dict()
    steps.close()
    assert after["step"] == state["step"] + 2
    for name, (start, flag) in state["places"].items():
        begin, end = after["places"][name]
        assert torch.equal(after["left"][begin:end], state["left"][start:flag])
    assert state["left"].any()


def test_names_of_wires_are_torchs_dtypes():
    assert [wire_dtype(wire) for wire in CODES] == list(WIRES)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_residual_that_ranks_of_a_node_share_survives_saving_to_the_bit(ranks: int):
    """It is saved in the units of one rank, and held in those of the node's mean: thirds, fifths, sevenths."""
    model = nn.Linear(BLOCK, 64)
    slots = GradientBuffer(slots_of(dict(model.named_parameters()), model), BLOCK).slots
    whole = slice(0, slots[-1].stop)
    before, after = ErrorFeedback(slots, CPU), None
    Packer(before.blocks(whole), 2, torch.int8, CPU, ranks)
    rows = before._pieces[0][1].rows
    rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    after = ErrorFeedback(slots, CPU, before.gathered())
    after.share(ranks, lambda _: None)  # the other ranks of the node hold zeros where this one holds rows
    Packer(after.blocks(whole), 2, torch.int8, CPU, ranks)
    real = before._pieces[0][2]
    assert torch.equal(after._pieces[0][1].rows[real], rows[real])
