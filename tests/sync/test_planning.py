"""The cost model and the plans made with it, on networks and steps that are given."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.cost.link import Link
from imagenet_fast.cost.releases import Task, plan_releases
from imagenet_fast.cost.simulation import THRESHOLDS, deferred_step, fused_step, serial_step
from imagenet_fast.cost.timing import Timing
from imagenet_fast.recipe.schema import Sgd
from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DearSync,
    GradientPool,
    LazySync,
    attach,
    declare,
)
from imagenet_fast.sync.collectives import piece_bytes
from imagenet_fast.sync.engine import Engine
from imagenet_fast.sync.messages import messages_of
from imagenet_fast.sync.prediction import best_fuse, predict
from imagenet_fast.sync.probing import Network
from imagenet_fast.training.optimizers import build_optimizer
from tests.spawning import run

# Five layers in pool order, last one first: two large ones whose gradients come early, three small ones.
TIMING = Timing((0.8, 0.7, 0.4, 0.2, 0.0), 1.0, (0.1, 0.3, 0.8, 1.4, 2.0), 2.0)
MESSAGES = (20e6, 80e6, 2e6, 1e6, 1e6)


def tasks_of(pieces: int = 4) -> tuple[list[Task], list[range]]:
    tasks, carried = [], []
    for span, message in enumerate(MESSAGES):
        for _ in range(pieces):
            tasks.append(Task(span, message / pieces, (0, -span)))
            carried.append(range(span, span + 1))
    return tasks, carried


def test_every_task_is_released_once_not_before_it_can_begin_nor_before_its_predecessor():
    chance = random.Random(0)
    for _ in range(50):
        tasks: list[Task] = []
        for number in range(40):
            after = chance.choice([None, *range(number)])
            tasks.append(Task(chance.randrange(5), chance.uniform(0, 3e6), (chance.randrange(3),), after))
        times = sorted(chance.uniform(0, 1) for _ in range(6))
        order = [(event, n) for event, ns in enumerate(plan_releases(tasks, times, 1e-8)) for n in ns]
        assert sorted(n for _, n in order) == list(range(40))
        position = {n: place for place, (_, n) in enumerate(order)}
        for event, n in order:
            assert event >= tasks[n].event
            assert tasks[n].after is None or position[tasks[n].after] < position[n]


def test_what_is_needed_sooner_overtakes_what_is_held_back():
    tasks, _ = tasks_of()
    releases = plan_releases(tasks, [*TIMING.ready, TIMING.backward_s], 4e-8)
    flat = [n for event in releases for n in event]
    assert flat != sorted(flat, key=lambda n: tasks[n].event), "some large pieces are held back"
    small = [flat.index(n) for n, task in enumerate(tasks) if task.event >= 2]
    large = [flat.index(n) for n, task in enumerate(tasks) if task.event == 1]
    assert max(large) > max(small)


def test_a_deferred_step_takes_the_longer_of_compute_and_wire():
    tasks, carried = tasks_of(16)
    for s_per_byte, busy in ((1e-9, 0.104), (1e-8, 1.04), (4e-8, 4.16)):
        step = deferred_step(tasks, carried, TIMING, Link(1e-4, s_per_byte))
        assert max(TIMING.compute_s, busy) <= step <= 1.12 * max(TIMING.compute_s, busy)


def test_a_fused_step_hides_what_backward_covers_and_no_more():
    fast, slow = Link(0.0, 1e-9), Link(0.0, 1e-7)
    one_by_one, at_once = list(enumerate(MESSAGES)), [(4, sum(MESSAGES))]
    assert fused_step(one_by_one, TIMING, fast) == pytest.approx(3.0, abs=2e-3)
    assert fused_step(one_by_one, TIMING, slow) == pytest.approx(1.0 + 0.1 + 10.4)
    assert fused_step(at_once, TIMING, slow) == pytest.approx(3.0 + 10.4)
    assert serial_step(MESSAGES, TIMING, Link(0.5, 1e-7)) == pytest.approx(3.0 + 5 * 0.5 + 10.4)


def pooled() -> GradientPool:
    """A hundredth of the five layers, of one rank."""
    sizes = [int(message / 4 / 100) - 1 for message in MESSAGES]
    return GradientPool((f"{n}.weight", nn.Parameter(torch.zeros(sizes[n]))) for n in reversed(range(len(sizes))))


@pytest.mark.parametrize(
    "engine", [declare(LazySync(wire="fp32")), declare(DearSync(wire="fp32"))], ids=["lazy", "dear"]
)
def test_the_best_threshold_is_never_worse_than_none_or_all(engine: Engine):
    pool, fp32 = pooled(), torch.float32

    def network(link: Link) -> Network:
        return Network(pool.topology, fp32, link)

    for latency in (0.0, 1e-3, 0.1, 1.0):
        for s_per_byte in (1e-7, 1e-6, 1e-5):
            wires = network(Link(latency, s_per_byte))
            sizes = [size for size in THRESHOLDS if not engine.planned or size >= piece_bytes(pool.topology)]
            steps = [predict(engine, pool, fp32, size, TIMING, wires) for size in sizes]
            best = predict(engine, pool, fp32, best_fuse(engine, pool, fp32, TIMING, wires), TIMING, wires)
            assert best <= 1.01 * min(steps)
    if not engine.planned:
        assert best_fuse(engine, pool, fp32, TIMING, network(Link(10.0, 1e-7))) == math.inf


def test_messages_tile_the_pool_and_none_is_longer_than_a_piece():
    pool, piece = pooled(), piece_bytes(pooled().topology)
    network = Network(pool.topology, torch.float32, Link(0.0, 1e-9))
    for settings in (AllReduceSync(), LazySync(), DearSync(), LazySync(collective="parameter_server", servers=3)):
        engine = declare(settings)
        for fuse in (0.0, 2.0**16, 2.0**19, math.inf):
            messages = messages_of(engine, pool, engine.wire, fuse, network)
            for half in (0, 1) if engine.halves else (None,):
                parts = [message.part for message in messages if message.half == half]
                assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
                assert parts[-1].stop == len(pool.buffer)
                assert all((part.stop - part.start) * engine.wire.itemsize <= piece for part in parts)
            runs = list(dict.fromkeys(tuple(message.run) for message in messages))
            assert [span for run in runs for span in run] == pool.spans
            assert all((run[-2].stop - run[0].start) * engine.wire.itemsize < fuse for run in runs if len(run) > 1)
            for number, message in enumerate(messages):
                assert message.task.event == (len(pool.spans) if engine.awaits == "each" else message.run[-1].index)
                assert message.task.after == (number - 1 if message.half == 1 else None), "a gather follows its scatter"
    assert len(messages_of(declare(AllReduceSync()), pool, torch.float32, math.inf, network)) > len(pool.spans)


def test_auto_decides_alike_everywhere_and_trains_on():
    decisions = run(2, _decide)
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
            stats = sync.finish()
            sync.update(lambda params, optimizer=optimizer: optimizer.step(0.1, params))
            if stats.decision:
                decisions.append([(p.engine, p.step_s, p.exact, p.chosen) for p in stats.decision])
        sync.settle()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[2]), "two ranks add in one order only"
    assert torch.equal(weights[1], weights[2])
    assert not {"hybrid", "dear"} & {engine for engine, *_ in decisions[1]}
    return decisions[0]
