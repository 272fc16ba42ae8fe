"""What travels in a step, and the engine that chooses an engine."""

from __future__ import annotations

import copy
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.collectives import cost_of, piece_bytes
from imagenet_fast.cost_model.step_simulator import NO_CODEC, LinkModel
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DearSync,
    GradientPool,
    HybridSync,
    LazySync,
    SparseSync,
    attach,
    build_engine,
    declare,
)
from imagenet_fast.sync.auto import Auto, Candidate
from imagenet_fast.sync.bucket_scheduler import Scheduler
from imagenet_fast.sync.bucketing import step_model
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.sync.topology import Topology
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync import loops


def pooled() -> GradientPool:
    """Two large layers, three small ones, of one rank."""
    sizes = [799_999, 3_199_999, 4999, 2499, 2499]
    return GradientPool((f"{n}.weight", nn.Parameter(torch.zeros(sizes[n]))) for n in reversed(range(len(sizes))))


def test_messages_tile_the_pool_and_none_is_longer_than_a_piece():
    pool, piece = pooled(), piece_bytes(pooled().topology.layout)
    network = NetworkProbe(pool.topology, torch.float32, LinkModel(0.0, 1e-9))
    for settings in (AllReduceSync(), LazySync(), DearSync(), LazySync(collective="parameter_server", servers=3)):
        engine = declare(settings)
        for fuse in (0.0, 2.0**16, 2.0**19, math.inf):
            messages = step_model(engine, pool, engine.wire, network).messages(fuse)
            for half in (0, 1) if engine.split_reduce_scatter else (None,):
                parts = [message.part for message in messages if message.half == half]
                assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
                assert parts[-1].stop == len(pool.buffer)
                assert all((part.stop - part.start) * engine.wire.itemsize <= piece for part in parts)
            runs = list(dict.fromkeys(tuple(message.bucket) for message in messages))
            assert [slot for run in runs for slot in run] == pool.slots
            assert all((run[-2].stop - run[0].start) * engine.wire.itemsize < fuse for run in runs if len(run) > 1)
            for number, message in enumerate(messages):
                assert message.task.event == (len(pool.slots) if engine.awaits == "each" else message.bucket[-1].index)
                assert message.task.after == (number - 1 if message.half == 1 else None), "a gather follows its scatter"
    pieces = step_model(declare(AllReduceSync()), pool, torch.float32, network).messages(math.inf)
    assert len(pieces) > len(pool.slots)


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[list[tuple[str, float, bool, bool]], list[str], list[float]]]:
    return run(2, _decide_elect_and_measure)


def _decide_elect_and_measure() -> tuple[list[tuple[str, float, bool, bool]], list[str], list[float]]:
    _change_to_codes()
    return _decide(), _elect(), _measure()


def test_auto_decides_alike_everywhere_and_trains_on(two_ranks):
    decisions = [decision for decision, *_ in two_ranks]
    assert decisions[0] == decisions[1]
    engines = {engine for engine, *_ in decisions[0]}
    assert engines == {"allreduce", "ring", "lazy", "hybrid", "dear", "sparse", "powersgd", "ddp"}
    assert sum(chosen for *_, chosen in decisions[0]) == 1
    assert all(exact for _, _, exact, chosen in decisions[0] if chosen)
    assert all(seconds > 0 for _, seconds, *_ in decisions[0])


def _decide() -> list[tuple[str, float, bool, bool]]:
    weights, decisions = [], []
    for settings in (AutoSync(wire="fp32"), AutoSync(wire="fp32", defer=False), LazySync(wire="fp32")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        _, sync = attach(model, settings)
        optimizer = build_optimizer(Sgd(kind="sgd", lr=0.1, weight_decay=0.0), model)
        for step in range(9):
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            sync.zero_grad()
            model(images).square().mean().backward()
            stats = sync.step(optimizer)
            if stats.decision:
                decisions.append([(p.engine, p.step_s, p.exact, p.chosen) for p in stats.decision])
        sync.settle()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[2]), "two ranks add in one order only"
    assert torch.equal(weights[1], weights[2])
    assert not {"hybrid", "dear"} & {engine for engine, *_ in decisions[1]}
    return decisions[0]


def test_auto_may_choose_an_inexact_engine_and_loses_no_gradient(two_ranks):
    assert [elected for _, elected, _ in two_ranks] == [["sparse"], ["sparse"]]


class Scaled(nn.Module):
    """Vectors, which have no factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((120_000,), 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x * weight).tanh()
        return x


def _elect() -> list[str]:
    """On a wire so slow that fewer bytes are all that counts; against ``sparse`` put in lazy's place by hand."""
    sparse = SparseSync(wire="fp32", dense_epochs=0.0)
    slow = LinkModel(0.0, 1e-3)
    weights, chosen = [], []
    for settings in (AutoSync(wire="fp32", inexact=True), LazySync(wire="fp32", threshold_mb=1.0)):
        model = Scaled()
        pool = GradientPool(model)
        pool.attach(build_engine(settings, pool, steps_per_epoch=1))
        optimizer = build_optimizer(Sgd(kind="sgd", lr=0.1, weight_decay=0.0), model)
        for step in range(9):
            if step == 5 and isinstance(settings, LazySync):
                pool.attach(build_engine(sparse, pool, steps_per_epoch=1))
            images = torch.randn(4, 120_000, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            pool.zero_grad()
            model(images).square().mean().backward()
            with patch("imagenet_fast.sync.network_benchmark.measure_link", lambda *_: slow):
                stats = pool.end_backward()
            pool.step(optimizer)
            chosen += [prediction.engine for prediction in stats.decision if prediction.chosen]
        assert isinstance(pool.reducer.engine, Sparse)
        assert 0 < len(pool.reducer.engine.sent) < len(pool.buffer) // 32768
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        pool.close()
    assert torch.equal(*weights)
    return chosen


def _change_to_codes() -> None:
    """Of an engine that defers and lays the pool out anew; a step takes the mean of what its backward made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 10))
    pool = GradientPool(model)
    meanwhile, coded = declare(LazySync(wire="fp32", threshold_mb=1.0)), declare(HybridSync(wire="int8"))
    pool.attach(Auto(pool, meanwhile, [Candidate("hybrid int8", coded, exact=False)]))
    for step in range(8):
        images = torch.randn(4, 50, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        pool.settle()
        alone = copy.deepcopy(model)
        before = [p.detach().clone() for p in model.parameters()]
        for module in (alone, model):
            if module is model:
                pool.zero_grad()
            module(images).square().mean().backward()
        pool.end_backward()
        pool.update(lambda params: torch._foreach_sub_([p.data for p in params], [0.1 * p.grad for p in params]))
        pool.settle()
        for param, old, own in zip(model.parameters(), before, alone.parameters(), strict=True):
            mean = own.grad.clone()
            dist.all_reduce(mean)
            assert (old - 0.1 * mean / 2 - param.detach()).norm() <= 0.1 * (2e-2 * mean.norm() + 1e-6), step
    assert isinstance(pool.reducer.engine, Scheduler)
    pool.close()


def test_auto_says_at_once_that_it_may_leave_elements_behind():
    """So that an optimizer of torch is refused in the first step, and not where sparse is elected."""
    for settings in (AutoSync(), AutoSync(inexact=True)):
        pool = GradientPool(nn.Linear(3, 2))
        pool.attach(engine := build_engine(settings, pool))
        assert engine.sends_part == settings.inexact
        pool.close()


def test_what_is_measured_is_the_same_on_every_rank(two_ranks):
    figures = [measured for *_, measured in two_ranks]
    assert figures[0] == figures[1]
    latency_s, s_per_byte, call_s, encode, decode = figures[0]
    assert latency_s > 0
    assert min(s_per_byte, call_s) >= 0
    assert min(encode, decode) > 0


def _measure() -> list[float]:
    topology = Topology(torch.device("cpu"))
    network = NetworkProbe(topology, torch.bfloat16)
    link = network.link("butterfly")
    assert network.link("butterfly") is link, "measured once"
    assert network.seconds("butterfly", 1e6) == link.seconds(1e6)
    one, two = (network.seconds("parameter_server", 1e6, servers) for servers in (1, 2))
    assert one == network.link("parameter_server").seconds(1e6 * cost_of("parameter_server", topology.layout, 1))
    assert two == network.link("parameter_server").seconds(1e6 * cost_of("parameter_server", topology.layout, 2))
    codec = network.codec(torch.int8)
    assert network.codec(torch.int8) is codec, "measured once"
    assert network.codec(torch.bfloat16) == NO_CODEC
    topology.close()
    return [link.latency_s, link.s_per_byte, link.call_s, codec.encode_s_per_byte, codec.decode_s_per_byte]


def _auto_beside_a_collective_of_the_loop() -> Tensor:
    """A loop that sums its losses, where rank 1 has no batch in some steps."""
    model = loops.Layers()
    pool = loops.pooled(model, AutoSync(wire="fp32"))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(12):
        pool.zero_grad()
        loss = model(torch.full((2, 8), 0.1 * step + dist.get_rank())).square().mean()
        if dist.get_rank() == 0 or step in (1, 2):
            loss.backward()
        dist.all_reduce(loss.detach())
        pool.step(optimizer)
    assert pool.reducer.engine is not None
    assert pool.reducer.engine.selected
    pool.close()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_auto_changes_engines_between_steps_and_not_in_backward():
    """It makes process groups, while another rank may be in a collective of the loop."""
    ours, theirs = run(2, _auto_beside_a_collective_of_the_loop)
    assert torch.equal(ours, theirs)
