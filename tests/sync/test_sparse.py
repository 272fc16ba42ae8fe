"""Sparse communication loses nothing, starves nothing, and is dense training where everything is sent."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.sync import GradientPool, LazySync, SparseSync
from imagenet_fast.sync.comm_stream import CommOp
from imagenet_fast.training.optimizers import SGD as OurSgd
from imagenet_fast.training.optimizers import build_optimizer
from tests.conftest import tiers
from tests.ranks import with_ranks
from tests.sync import loops
from tests.sync.given import Given, mean_over_ranks, pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, begin, ours

SGD = Sgd(kind="sgd", lr=0.03, weight_decay=1e-3)
CHUNK = 64


def settings(**changes: object) -> SparseSync:
    return SparseSync(
        **{"sparsity": 0.75, "chunk": CHUNK, "dense_epochs": 0, "ramp_epochs": 0, "wire": "fp32", **changes}
    )  # type: ignore[arg-type]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 30), nn.ReLU(), nn.Linear(30, 10))
    return model.to(memory_format=torch.channels_last)


def labelled_loss(model: nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return F.cross_entropy(model(images), images[:, 0].flatten(1)[:, :10].argmax(1))


def started(**changes: object) -> tuple[nn.Module, GradientPool, Any]:
    chosen, model = settings(**changes), network()
    return model, pooled(model, chosen), build_optimizer(SGD, model, chosen.velocity_momentum is not None)


@with_ranks(3)
def test_nothing_is_lost_and_all_ranks_send_the_same_chunks() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 20 * CHUNK + 37
    model = Given([(size,)])
    pool, (weight,) = pooled(model, settings(sparsity=0.8)), model.weights
    engine = pool.engine
    generator = torch.Generator().manual_seed(rank)
    produced, applied = torch.zeros(size), torch.zeros(size)
    for _ in range(15):
        gradient = world * torch.randint(-8, 9, (size,), generator=generator).float()
        produced += gradient
        pool.zero_grad()
        model([gradient]).backward()
        pool.finish()
        for part in engine.sent_slices()[weight]:
            applied[part] += weight.grad[part]
        sent = [None] * world
        dist.all_gather_object(sent, engine.sent)
        assert all(parts == sent[0] for parts in sent)
        assert sum(p.stop - p.start for p in engine.sent) <= math.ceil(0.2 * 21) * CHUNK
    residual = of_only(engine, "residual").clone()
    dist.all_reduce(produced)
    dist.all_reduce(residual)
    assert torch.equal(applied * world + residual, produced)


def of_only(engine: Any, kind: str) -> Tensor:
    """What is kept of the only parameter."""
    (own,) = engine.state_dict()["kept"].values()
    return own[kind]


RAMPED: dict[str, object] = {"sparsity": 0.9, "dense_epochs": 3, "ramp_epochs": 3, "wire": "bf16"}
CHANGES = {"at once": {}, "ramped": RAMPED, "corrected": RAMPED | {"momentum_correction": True}}


@pytest.mark.parametrize("how", tiers(["ramped"], CHANGES))
@with_ranks(2)
def test_deferred_chunks_equal_awaited_ones_bitwise(how: str) -> None:
    weights = []
    for timing in ("lazy", "hybrid"):
        model, pool, optimizer = started(timing=timing, **CHANGES[how])
        for step in range(14):
            begin(model, pool, step, labelled_loss)
            pool.step(optimizer)
        pool.settle()
        weights.append(weights_of(model))
    assert torch.equal(*weights)


@with_ranks(2)
def test_no_chunk_starves() -> None:
    chunks = 23
    model = Given([(chunks * CHUNK - 1,)])  # an element more says whether a rank has used it
    pool = pooled(model, settings(sparsity=0.85))
    gradient = torch.ones(chunks, CHUNK)
    gradient[:5] = 1e6  # would win every time
    last_sent = [0] * chunks
    for step in range(1, 45):
        pool.zero_grad()
        model([gradient.flatten()[:-1]]).backward()
        pool.finish()
        for part in pool.engine.sent:
            for chunk in range(part.start // CHUNK, part.stop // CHUNK):
                last_sent[chunk] = step
        turn = math.ceil(chunks / math.ceil(0.15 * chunks))
        assert all(step - last <= 3 * turn for last in last_sent), last_sent


@with_ranks(2)
def test_corrected_momentum_is_that_of_deep_gradient_compression() -> None:
    """Beside its formulas, to the bit: gradients are integers, the momentum is a half. Everything is sent at first."""
    size, world, rank = 12 * CHUNK - 1, 2, dist.get_rank()
    model = Given([(size,)])
    chosen = settings(sparsity=0.75, dense_epochs=3, momentum_correction=True, momentum=0.5)
    pool, (weight,) = pooled(model, chosen), model.weights
    velocity, residual = torch.zeros(world, size), torch.zeros(world, size)
    for step in range(16):
        generator = torch.Generator().manual_seed(step)
        gradients = world * torch.randint(-8, 9, (world, size), generator=generator).float()
        velocity = 0.5 * velocity + gradients
        residual += velocity
        pool.zero_grad()
        with pool.no_sync():
            model([0.25 * gradients[rank]]).backward()
        model([0.75 * gradients[rank]]).backward()
        pool.finish()
        for part in pool.engine.sent:
            part = slice(part.start, min(part.stop, size))
            assert torch.equal(weight.grad[part], residual.mean(0)[part]), step
            residual[:, part] = 0.0
            if step >= 3:
                velocity[:, part] = 0.0
        assert torch.equal(of_only(pool.engine, "velocity"), velocity[rank]), step


@with_ranks(2)
def test_where_everything_is_sent_corrected_momentum_is_momentum() -> None:
    """Decay included; the pool learns the order of layers that are registered in another."""
    weights = []
    for chosen in (LazySync(wire="fp32"), settings(sparsity=0.0, momentum_correction=True)):
        model = Layers((3, 0, 4, 1, 2))
        optimizer = ours(model, lr=0.01, weight_decay=1e-3, momentum=0.9, corrected=chosen.kind == "sparse")
        loops.train(model, pooled(model, chosen), optimizer, range(12))
        weights.append(weights_of(model))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("timing", ["lazy", "hybrid"])
@with_ranks(2)
def test_what_comes_after_an_update_sees_what_it_has_updated(timing: str) -> None:
    """A moving average, which is no optimizer."""
    model, pool, optimizer = started(timing=timing)
    averaged: list[set[nn.Parameter]] = []
    for step in range(3):
        averaged.append(set())
        begin(model, pool, step, labelled_loss)
        pool.step(optimizer, then=[lambda params, seen=averaged[-1]: seen.update(params)])
        pool.settle()
    assert averaged == [set(model.parameters())] * 3


@pytest.mark.parametrize("timing", ["lazy", "hybrid"])
@pytest.mark.parametrize("way", ["nested", "apart"])
@with_ranks(2)
def test_momentum_correction_takes_in_what_a_later_backward_of_the_step_adds(way: str, timing: str) -> None:
    """A reentrant checkpoint's backward ends inside another one; two losses may reach different layers."""
    chosen = settings(sparsity=0.0, timing=timing, momentum_correction=True, momentum=0.9)
    torch.testing.assert_close(_in_parts(chosen, way), _in_parts(chosen, "plain" if way == "nested" else "at once"))


def _in_parts(chosen: SparseSync, way: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pool = pooled(model, chosen)
    optimizer = build_optimizer(Sgd(kind="sgd", lr=0.02, weight_decay=0.0), model, True)
    for step in range(6):
        pool.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        images = torch.randn(6, 8, generator=generator).requires_grad_()
        if way in ("at once", "apart"):
            losses = [model[:2](images).square().sum(), model[2:](images).square().sum()]
            for loss in [losses[0] + losses[1]] if way == "at once" else losses:
                loss.backward()
        else:
            value = images
            for layer in model:
                value = (checkpoint(layer, value, use_reentrant=True) if way == "nested" else layer(value)).tanh()
            value.square().sum().backward()
        pool.step(optimizer)
    pool.settle()
    return weights_of(model)


@with_ranks(2)
def test_gradients_are_the_means_of_what_was_sent() -> None:
    model, pool, optimizer = started(sparsity=0.5)
    begin(model, pool, 0, labelled_loss)
    pool.gradients.fill()
    before = torch.cat([pool.gradients.values[slot.start : slot.flag] for slot in pool.slots])
    pool.finish()
    gradients = [slot.param.grad.as_strided((slot.param.numel(),), (1,)) for slot in pool.slots]  # as they lie there
    shown, sent = torch.cat(gradients), pool.engine.sent_slices()
    for slot, gradient in zip(pool.slots, gradients, strict=True):
        for part in sent.get(slot.param, ()):
            gradient[part] = 0
        assert not gradient.any(), "what was not sent is zero"
    pool.step(optimizer)
    same_on_ranks(shown)
    there = shown != 0
    assert 0.2 < there.float().mean() < 0.8
    torch.testing.assert_close(shown[there], mean_over_ranks(before)[there])


@pytest.mark.parametrize("kind", [OurSgd, torch.optim.AdamW])
@with_ranks(2)
def test_ranks_clip_alike_what_was_sent(kind: Any) -> None:
    """By a step of the pool, or by the optimizer's own. Each rank has a residual of its own, which must not be in
    ``p.grad``."""
    model = network()
    pool, optimizer = pooled(model, settings(sparsity=0.5)), kind(model.parameters(), lr=0.1)
    for step in range(6):
        begin(model, pool, step, labelled_loss)
        pool.finish()
        pool.finish()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0
        same_on_ranks(norm)
        pool.step(optimizer) if kind is OurSgd else optimizer.step()
    same_on_ranks(weights_of(model))


@pytest.mark.parametrize("dtype", tiers([torch.bfloat16], [torch.float64, torch.float16]))
@with_ranks(2)
def test_it_takes_every_dtype(dtype: torch.dtype) -> None:
    model = Layers().to(dtype)
    pool, optimizer = pooled(model, settings(sparsity=0.5)), ours(model)
    for step in range(4):
        pool.zero_grad()
        model(torch.full((2, 8), 0.1 * step, dtype=dtype)).square().mean().backward()
        pool.step(optimizer)
    assert weights_of(model).isfinite().all()


@with_ranks(2)
def test_chunks_on_their_way_are_kept_until_they_have_landed() -> None:
    """Also under streams: `tests/gpu/test_streams.py`."""
    model = Layers()
    pool = pooled(model, settings(sparsity=0.5, chunk=16, timing="hybrid"))
    engine = pool.engine
    for step in range(2):  # in the first there is no telling who reads what
        gate = threading.Event()
        engine._measurement[0].stream.submit(CommOp(None, lambda gate=gate: gate.wait() and None))
        begin(model, pool, step)
        pool.end_backward()
        ops = [weakref.ref(op) for message in engine._messages for op in message.ops]
        gc.collect()
        assert ops
        assert all(op() is not None for op in ops)
        gate.set()
        pool.update(lambda params, elements=None: None)
        if step == 1:
            assert engine._messages, "the next forward waits for them"
        model(torch.ones(1, 8))
        gc.collect()
        assert all(op() is None for op in ops), "but no longer"
