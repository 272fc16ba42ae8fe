"""The pool: one buffer, views with the parameters' strides, slots in one order."""

from __future__ import annotations

import gc
import math
import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor

from imagenet_fast.distributed.device_timer import Stopwatch
from imagenet_fast.sync import EngineSettings, GradientPool, LazySync, ParamSlot, PowerSgdSync, SparseSync
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from tests.ranks import with_ranks
from tests.sync.given import pooled
from tests.sync.loops import ours


class Listener(SyncEngine):
    """Notes what it is handed."""

    def __init__(self, gradients: GradientBuffer) -> None:
        self.gradients = gradients
        self.pushed: list[tuple[ParamSlot, torch.Tensor]] = []

    def gradient_ready(self, slot: ParamSlot) -> None:
        self.gradients.fill()
        self.pushed.append((slot, self.gradients.values[slot.start : slot.flag].clone()))

    def finish(self) -> SyncStats:
        return SyncStats(Stopwatch(torch.device("cpu")))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 36, 7))
    return layers.to(memory_format=torch.channels_last)


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@with_ranks(2)
def test_slots_tile_the_buffer_last_layer_first_on_64_byte_lines():
    model = network()
    pool = GradientPool(model, lambda gradients: Listener(gradients))
    names = [name for name, _ in model.named_parameters()]
    assert [slot.name for slot in pool.slots] == names[::-1]
    stops = [0, *(slot.stop for slot in pool.slots)]
    for slot, previous in zip(pool.slots, stops, strict=False):
        assert slot.start == previous
        assert slot.start % 16 == 0
        assert slot.stop - slot.start > slot.param.numel(), "an element more says whether a rank has used it"
    assert stops[-1] == pool.gradients.values.numel()


@with_ranks(2)
def test_slots_are_pushed_once_a_step_in_pool_order_and_final():
    model, aside = network(), nn.Parameter(torch.ones(2))  # which the last backward does not reach
    pool = GradientPool([("aside", aside), *model.named_parameters()], lambda own: Listener(own), model=model)
    pushed = pool.engine.pushed
    for _ in range(2):
        pushed.clear()
        pool.zero_grad()
        with pool.no_sync():
            (model(IMAGES).sum() + aside.sum()).backward()
        assert pushed == []
        model(IMAGES).sum().backward()
        assert len(pushed) == len(pool.slots) - 1, "all leave within backward but one, which tells of its end"
        pool.finish()
        assert [slot for slot, _ in pushed] == pool.slots
        for slot, seen in pushed:
            assert slot.param.grad is not None
            slot.param.grad.detach_()  # as loops did before there was set_to_none
            assert torch.equal(pool.gradients.values[slot.start : slot.flag], seen)


@pytest.mark.parametrize("settings", [LazySync(wire="int8"), PowerSgdSync(rank=1)], ids=lambda settings: settings.kind)
def test_one_rank_leaves_gradients_where_autograd_put_them_and_rounds_nothing(settings: EngineSettings):
    """Nothing is sent, so nothing is copied, until somebody reads the buffer, as PowerSGD does, or a guard."""
    model, expected = network(), network()
    pool = pooled(model, settings)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1e-5, momentum=0.9) for m in (model, expected))
    for step in range(6):
        if step == 5:
            pool.guard(1e4)
        pool.zero_grad()
        other.zero_grad()
        for micro in range(1 + step % 3):
            with nullcontext() if micro == step % 3 else pool.no_sync():
                model(IMAGES * (micro + 1)).square().sum().backward()
            expected(IMAGES * (micro + 1)).square().sum().backward()
        if step == 3:
            pool.finish()
            model[0].weight.grad = None
            expected[0].weight.grad = None
        pool.step(optimizer)
        other.step()
        begin, end = pool.gradients.values.data_ptr(), pool.gradients.values.data_ptr() + pool.gradients.values.nbytes
        for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
            if param.grad is not None:
                assert (begin <= param.grad.data_ptr() < end) == (step == 5 or settings.kind == "powersgd")
            assert torch.equal(param, reference)


SPARSE = SparseSync(wire="fp32", sparsity=0.5, chunk=4096, ramp_epochs=0)
COPIES: list[tuple[EngineSettings, float]] = [
    (LazySync(wire="fp32"), 1.0), (LazySync(wire="int8"), 3.8), (PowerSgdSync(wire="fp32"), 2.0), (SPARSE, 1.0),
    (SPARSE.model_copy(update={"momentum_correction": True}), 2.0),
]  # fmt: skip
"""Of the model's size: the pool; with 8 bits the residual, rows and codes of both ways; errors; velocity."""


@pytest.mark.parametrize(("settings", "copies"), COPIES)
@with_ranks(2)
def test_a_rank_holds_no_copy_of_a_model_that_it_does_not_need(settings: EngineSettings, copies: float) -> None:
    model = nn.Linear(1024, 256)
    before = bytes_of_tensors()
    pool, optimizer = pooled(model, settings), ours(model, corrected=settings.velocity_momentum is not None)
    for _ in range(3):
        pool.zero_grad()
        model(torch.ones(2, 1024)).sum().backward()
        pool.step(optimizer)
    optimizer.state.clear()
    pool.zero_grad()
    until, held = time.monotonic() + 10, math.inf
    while held > copies + 0.1 and time.monotonic() < until:
        time.sleep(0.01)  # sparse's thread may still send what chooses the next chunks
        held = (bytes_of_tensors() - before) / (4 * 1024 * 256)
    assert held == pytest.approx(copies, abs=0.1)


def bytes_of_tensors() -> int:
    """Of all that live in this process, but for those that the compiler keeps, which have no memory."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # some are placeholders, which refuse
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor)]
        storages = [one.untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_one_rank_adds_to_gradients_that_a_backward_did_not_reach():
    """A backward of one part ends while the other part, whose gradients are there already, has one to come."""
    model = network()
    pool = pooled(model, LazySync())
    head = torch.ones(1, 180)
    for _ in range(2):
        pool.zero_grad()
        with pool.no_sync():
            model[3](head).sum().backward()
        model[:3](IMAGES).sum().backward()
        with pool.no_sync():
            model[3](head).sum().backward()
        pool.finish()
        assert torch.equal(model[3].weight.grad, torch.full((7, 180), 2.0))


@pytest.mark.usefixtures("subprocesses")
@with_ranks(2, fresh=True)
def test_ranks_connect_though_one_of_them_has_made_a_process_group_of_its_own():
    """torch tells groups of the same ranks apart by a counter of the process, older versions by another."""
    counters = dist.distributed_c10d._world
    for count in (lambda: counters.group_count, lambda: len(counters.pg_names)):
        with patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda ranks: f"{ranks} {count()}"):  # noqa: B023
            if dist.get_rank() == 0:
                dist.new_group([0], use_local_synchronization=True)
            GradientPool(network(), LazySync()).close()
