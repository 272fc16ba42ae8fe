"""What travels in a step, and the engine that chooses an engine."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast import sync
from imagenet_fast.cost_model.collectives import cost_of, piece_bytes
from imagenet_fast.cost_model.step_simulator import NO_CODEC, LinkModel
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import AutoSync, GradientPool, LazySync, SyncStats, declare
from imagenet_fast.sync.auto import Auto, Candidate
from imagenet_fast.sync.bucket_scheduler import step_model
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.training.optimizers import build_optimizer
from tests.conftest import tiers
from tests.ranks import lending, run, with_ranks
from tests.sync.given import mean_over_ranks, pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, unmeasured


def pool_of_five(dtype: torch.dtype = torch.float32) -> GradientBuffer:
    """Two large layers, three small ones, of one rank."""
    sizes = [799_999, 3_199_999, 4999, 2499, 2499]
    named = [(f"{n}.weight", nn.Parameter(torch.zeros(sizes[n], dtype=dtype))) for n in reversed(range(len(sizes)))]
    return GradientPool(named, LazySync()).gradients


def test_messages_tile_the_pool_and_none_is_longer_than_a_piece():
    pool = pool_of_five(torch.bfloat16)
    piece = piece_bytes(pool.topology.layout)
    network = NetworkProbe(pool.topology, torch.float32, LinkModel(0.0, 1e-9))
    served = LazySync(collective="parameter_server", servers=3)
    for settings in (sync.AllReduceSync(), LazySync(), sync.DearSync(), served):
        engine = declare(settings)
        for fuse in (0.0, 2.0**16, 2.0**19, math.inf):
            messages = step_model(engine, pool, network).messages(fuse)
            for half in (0, 1) if engine.split_reduce_scatter else (None,):
                parts = [message.part for message in messages if message.half == half]
                assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
                assert parts[-1].stop == len(pool.values)
                assert all((part.stop - part.start) * 2 <= piece for part in parts)
            runs = list(dict.fromkeys(tuple(message.bucket) for message in messages))
            assert [slot for run in runs for slot in run] == pool.slots
            assert all((run[-2].stop - run[0].start) * 2 < fuse for run in runs if len(run) > 1)
            for number, message in enumerate(messages):
                assert message.task.event == (len(pool.slots) if engine.awaits == "each" else message.bucket[-1].index)
                assert message.task.after == (number - 1 if message.half == 1 else None), "a gather follows its scatter"
    pieces = step_model(declare(sync.AllReduceSync()), pool_of_five(), network).messages(math.inf)
    assert len(pieces) > len(pool.slots)


SIZES = "imagenet_fast.sync.network_benchmark._SHORT_AND_LONG"
SMALL = {"cpu": (2**12, 2**14)}
"""Bytes of two messages by which links are measured here."""
SLOW = LinkModel(0.0, 1e-3)
"""A wire on which fewer bytes are all that counts."""
SGD = Sgd(kind="sgd", lr=0.1, weight_decay=0.0)


def images_of(step: int, features: int) -> Tensor:
    return torch.randn(4, features, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def take_step(model: nn.Module, pool: GradientPool, optimizer: Optimizer, images: Tensor) -> SyncStats:
    pool.zero_grad()
    model(images).square().mean().backward()
    return pool.step(optimizer)


@pytest.mark.parametrize("defers", tiers([True], [False]), ids=["deferring", "not deferring"])
def test_auto_decides_alike_everywhere_and_trains_on(defers: bool):
    decisions, others = run(2, _decide, defers)
    assert decisions == others
    engines = {engine for engine, *_ in decisions}
    deferring = {"hybrid", "dear"} if defers else set()
    assert engines == {"allreduce", "ring", "lazy", "sparse", "powersgd", "ddp"} | deferring
    assert sum(chosen for *_, chosen in decisions) == 1
    assert all(exact for _, _, exact, chosen in decisions if chosen)
    assert all(seconds > 0 for _, seconds, *_ in decisions)


@patch(SIZES, SMALL)
def _decide(defers: bool) -> list[tuple[str, float, bool, bool]]:
    weights, decisions = [], []
    for settings in (AutoSync(wire="fp32", defer=defers), LazySync(wire="fp32")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(192, 40), nn.Tanh(), nn.Linear(40, 10))
        pool, optimizer = pooled(model, settings), build_optimizer(SGD, model)
        for step in range(9):
            decisions += take_step(model, pool, optimizer, images_of(step, 192)).decision
        pool.settle()
        weights.append(weights_of(model))
    assert torch.equal(*weights), "two ranks add in one order only"
    return [(p.engine, p.step_s, p.exact, p.chosen) for p in decisions]


class Scaled(nn.Module):
    """Vectors, which have no factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((60_000,), 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x * weight).tanh()
        return x


def test_auto_may_choose_an_inexact_engine_and_loses_no_gradient():
    """Against a pool of ``sparse`` after one of lazy."""
    (elected, ours), (others, theirs) = (run(2, _elect, by_hand)[0] for by_hand in (False, True))
    assert (elected, others) == (["sparse"], [])
    assert torch.equal(ours, theirs)


@unmeasured(SLOW)
def _elect(by_hand: bool) -> tuple[list[str], Tensor]:
    meanwhile = LazySync(wire="fp32", threshold_mb=1.0) if by_hand else AutoSync(wire="fp32", inexact=True)
    model, chosen = Scaled(), []
    pool, optimizer = pooled(model, meanwhile), build_optimizer(SGD, model)
    for step in range(9):
        if step == 5 and by_hand:
            pool.close()
            pool = pooled(model, sync.SparseSync(wire="fp32", dense_epochs=0.0))
        stats = take_step(model, pool, optimizer, images_of(step, 60_000))
        chosen += [prediction.engine for prediction in stats.decision if prediction.chosen]
    assert isinstance(pool.engine, Sparse)
    assert 0 < len(pool.engine.sent) < len(pool.gradients.values) // 32768
    return chosen, weights_of(model)


@with_ranks(2)
@unmeasured()
def test_auto_may_change_to_codes_and_a_step_takes_the_mean_of_what_its_backward_made() -> None:
    """Of an engine that defers and lays the pool out anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 10))
    meanwhile = declare(LazySync(wire="fp32", threshold_mb=1.0))
    candidates = [Candidate("hybrid int8", sync.HybridSync(wire="int8"), electable=True)]
    pool = GradientPool(model, lambda gradients: Auto(gradients, meanwhile, candidates))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        pool.settle()
        alone = copy.deepcopy(model)
        before = [p.detach().clone() for p in model.parameters()]
        alone(images_of(step, 50)).square().mean().backward()
        take_step(model, pool, optimizer, images_of(step, 50))
        pool.settle()
        for param, old, own in zip(model.parameters(), before, alone.parameters(), strict=True):
            mean = mean_over_ranks(own.grad)
            assert (old - 0.1 * mean - param.detach()).norm() <= 0.1 * (4e-2 * mean.norm() + 1e-6), step
    assert pool.engine.elected == "hybrid int8"
    pool.close()


def test_a_timer_is_let_go_of_with_its_layout():
    pool = pooled(model := Layers(), AutoSync())
    timer = weakref.ref(pool.engine._timetable)
    pool.engine.rebuild_buckets()
    gc.collect()
    assert timer() is None
    pool.load_state_dict({"order": None, "engine": {"elected": "ring"}})  # in whose place it needs none
    assert {layer._compiled_call_impl for layer in model.children()} == {None}
    pool.close()


def test_auto_says_at_once_that_it_may_leave_elements_behind():
    """So that an optimizer of torch is refused in the first step, and not where sparse is elected."""
    for settings in (AutoSync(), AutoSync(inexact=True)):
        pool = GradientPool(nn.Linear(3, 2), settings)
        assert pool.engine.sends_part == settings.inexact
        pool.close()


@with_ranks(2)
@patch("imagenet_fast.sync.network_benchmark.piece_elements", lambda *_: 2**13)
@patch(SIZES, SMALL)
def test_what_is_measured_is_the_same_on_every_rank_and_measured_once() -> None:
    topology = lending()
    network = NetworkProbe(topology, torch.bfloat16)
    link, codec = network.link("butterfly"), network.codec(torch.int8)
    assert network.link("butterfly") is link
    assert network.codec(torch.int8) is codec
    same_on_ranks(torch.tensor([link.latency_s, link.s_per_byte, codec.encode_s_per_byte, codec.decode_s_per_byte]))
    assert min(link.latency_s, codec.encode_s_per_byte, codec.decode_s_per_byte) > 0
    assert min(link.s_per_byte, link.call_s) >= 0
    assert network.codec(torch.bfloat16) == NO_CODEC
    for servers in (1, 2):
        share = cost_of("parameter_server", topology.layout, servers)
        expected = network.link("parameter_server").seconds(1e6 * share)
        assert network.seconds("parameter_server", 1e6, servers) == expected


@with_ranks(2)
@patch(SIZES, SMALL)
def test_auto_changes_engines_between_steps_and_not_in_backward() -> None:
    """It makes process groups, while another rank may be in a collective of the loop, which sums its losses. Rank 1
    has no batch in some steps."""
    model = Layers()
    pool = pooled(model, AutoSync(wire="fp32"))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(12):
        pool.zero_grad()
        loss = model(torch.full((2, 8), 0.1 * step + dist.get_rank())).square().mean()
        if dist.get_rank() == 0 or step in (1, 2):
            loss.backward()
        dist.all_reduce(loss.detach())
        pool.step(optimizer)
    assert pool.engine.elected
    same_on_ranks(weights_of(model))


@with_ranks(2)
@patch(SIZES, SMALL)
def test_auto_that_is_closed_before_it_changes_leaves_no_process_group() -> None:
    before, model = len(dist.distributed_c10d._world.pg_map), Layers()
    pool, optimizer = GradientPool(model, AutoSync(wire="fp32")), torch.optim.SGD(model.parameters(), 0.01)
    for step in range(5):
        stats = take_step(model, pool, optimizer, torch.full((2, 8), 0.1 * step))
    assert stats.decision
    pool.close()
    assert len(dist.distributed_c10d._world.pg_map) == before
