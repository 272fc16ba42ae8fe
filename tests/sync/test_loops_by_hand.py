"""Loops of users that programs (``tests/sync/programs``) have no words for."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import GradientPool
from imagenet_fast.sync.per_param_step import snapshot_step
from tests.conftest import tiers
from tests.ranks import lending, with_ranks
from tests.sync import loops
from tests.sync.fuzz_loops import ENGINES
from tests.sync.given import pooled, same_on_ranks, weights_of
from tests.sync.loops import Layers, alike, begin, loss_of, sgd, started, state, train, trained, unmeasured

DEFERRED = pytest.mark.parametrize("engine", tiers(["hybrid"], ["dear"]))


# Failures


DROPPING = ["lazy int8", "powersgd", "sparse", "sparse corrected"], ["lazy", "hybrid", "dear int8", "sparse hybrid"]


@pytest.mark.parametrize("engine", tiers(*DROPPING))
@with_ranks(2)
@unmeasured()
def test_a_dropped_step_is_thrown_away(engine: str) -> None:
    """No weight changes. Of gradients that are not finite, nothing is left, and what one rank had not sent is zero."""
    corrected = ENGINES[engine].velocity_momentum is not None
    model, pool, optimizer = trained(ENGINES[engine], 3, lambda model: loops.ours(model, lr=0.01, corrected=corrected))
    for step in (3, 5):
        pool.settle()
        before = state(model)
        pool.zero_grad()
        model.fails = 2 if dist.get_rank() == 1 else None
        with suppress(MemoryError):
            (torch.inf * loss_of(model, step)).backward()
        model.fails = None
        pool.drop()
        pool.settle()
        assert alike(state(model), before)
        train(model, pool, optimizer, range(step + 1, step + 4))
        assert not alike(state(model), before)
        same_on_ranks(weights_of(model))


class Emptied(Layers):
    """Its first parameter, and so the last one in the pool, has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.empty.sum())


ALONE = ["lazy", "lazy int8", "sparse"], ["hybrid", "powersgd", "dear int8", "sparse corrected", "sparse hybrid"]


@pytest.mark.parametrize("kind", [Layers, Emptied])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("engine", tiers(*ALONE))
@with_ranks(2)
@unmeasured()
def test_a_step_that_one_rank_alone_drops_is_taken_by_none_unseen(
    engine: str, guarded: bool, kind: type[Layers]
) -> None:
    """A guard has all skip it; without one, weights that are not finite tell."""
    model = kind()
    corrected = getattr(ENGINES[engine], "velocity_momentum", None) is not None
    pool, optimizer = pooled(model, ENGINES[engine]), loops.ours(model, corrected=corrected)
    if guarded:
        pool.guard(3e38)
    train(model, pool, optimizer)
    begin(model, pool, 3)
    if dist.get_rank() == 1:
        pool.drop()
    else:
        pool.end_backward()
        optimizer.found_inf = pool.found_inf
        pool.step(optimizer)
    pool.settle()
    assert weights_of(model).isfinite().all() == (guarded or dist.get_rank() == 1)
    if guarded:
        same_on_ranks(weights_of(model))


@pytest.mark.parametrize("engine", tiers(["hybrid"], ["lazy", "powersgd"]))
@with_ranks(2)
@unmeasured()
def test_a_rank_may_drop_a_step_because_its_model_was_converted(engine: str) -> None:
    """What it sends is of what the pool holds, so the other rank need not wait for it."""
    model, pool, _ = trained(ENGINES[engine], 3)
    pool.settle()
    pool.zero_grad()
    if dist.get_rank() == 1:
        model.double()
        with pytest.raises(RuntimeError, match="was converted after its gradient pool was made"):
            loss_of(lambda x: model(x.double()), 3).backward()
        pool.drop()
    else:
        loss_of(model, 3).backward()
        pool.end_backward()


@pytest.mark.parametrize("engine", tiers(["hybrid"], ["lazy", "dear"]))
@with_ranks(1)
def test_a_gradient_that_is_set_by_hand_is_taken_when_the_step_is(engine: str) -> None:
    """What its memory holds later is not applied."""
    model, pool, optimizer = trained(ENGINES[engine], 1)
    pool.zero_grad()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    own, before = [param.grad for param in model.parameters()], weights_of(model)
    pool.step(optimizer)
    for gradient in own:
        gradient.zero_()
    assert (weights_of(model) != before).all()


@with_ranks(2)
@unmeasured()
def test_a_lost_message_stays_lost() -> None:
    """No later read takes what its buffer holds, which no rank has averaged, for means."""
    chosen = ENGINES["hybrid"].model_copy(update={"fuse_mb": 1})
    model, pool, _ = trained(chosen, 8)  # until messages are in flight after a step
    in_flight = pool.engine._in_flight
    assert in_flight
    sent = dict(in_flight)
    in_flight |= dict.fromkeys(sent, (Mock(side_effect=RuntimeError("Connection closed by peer")),))
    for read in (lambda: model(loops.images(9)), model.state_dict) * 2:
        with pytest.raises(RuntimeError, match="closed by peer"):
            read()
    in_flight |= sent


def test_a_failing_close_is_a_note_on_the_users_exception():
    model, pool, optimizer = started(ENGINES["hybrid"])

    failing_update = Mock(side_effect=MemoryError("no memory for the update"))
    for step in range(3):
        begin(model, pool, step)
        pool.end_backward()
        pool.update(failing_update if step == 2 else lambda params: optimizer.step())

    with pytest.raises(KeyError) as raised, closing(pool):
        raise KeyError("the user's")
    assert any("no memory for the update" in note for note in raised.value.__notes__)
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules()), "the model is left to others"
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


# Updates that are deferred


@DEFERRED
@with_ranks(2)
def test_layers_are_updated_one_by_one_as_a_forward_gets_there(engine: str) -> None:
    """Also where a model asks ``next(self.parameters()).dtype``, by a method of its own that takes no arguments."""
    updated: list[list[nn.Parameter]] = []
    seen: list[int] = []

    class Asking(Layers):
        def parameters(self) -> Any:
            return (param for _, param in self.named_parameters())

        def forward(self, x: Tensor) -> Tensor:
            see()
            x = x.to(next(self.parameters()).dtype)
            see()
            return super().forward(x)

    def see(*_: object) -> None:
        seen.append(sum(map(len, updated)))

    model = Asking()
    pool = pooled(model, ENGINES[engine])
    for layer in (model.layer2, model.layer4):
        layer.register_forward_pre_hook(see)
    take_recorded_steps(pool, sgd(model), updated, lambda: loss_of(model, 0))
    seen.clear()
    loss_of(model, 8)
    begun, first, middle, last = seen
    assert begun == first == 0, "a dtype is no value"
    assert 2 < middle < 10
    assert 8 <= last < 10


def take_recorded_steps(pool: GradientPool, optimizer: Any, updated: list[Any], loss: Callable[[], Tensor]) -> None:
    """More than are watched; ``updated``: the parameters that calls for the last one have updated."""

    def update(params: list[nn.Parameter], elements: object = None) -> None:
        updated.append(params)
        apply(params)

    for _ in range(8):
        pool.zero_grad()
        loss().backward()
        updated.clear()
        apply = snapshot_step(optimizer)
        pool.end_backward()
        pool.update(update)


@DEFERRED
@with_ranks(2)
def test_what_came_together_is_updated_together(engine: str) -> None:
    """Of 107 modules one by one, launches alone cost ResNet-50 8 times what one update of all costs."""
    model = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(20)))
    updated: list[list[nn.Parameter]] = []
    pool = pooled(model, ENGINES[engine].model_copy(update={"fuse_mb" if engine == "hybrid" else "bucket_mb": 1}))
    ones = torch.ones(1, 1, 2, 2)
    take_recorded_steps(pool, loops.ours(model), updated, lambda: model(ones).sum())
    model(ones)
    assert sum(map(len, updated)) == 40
    assert len(updated) <= 2, "one message, but for what a plan wants first"


@with_ranks(2)
def test_the_pool_learns_in_which_order_gradients_come() -> None:
    model, orders = Layers((3, 0, 4, 1, 2)), []
    pool = pooled(model, ENGINES["lazy"])
    for _ in range(2):
        orders.append([int(slot.layer[-1]) for slot in pool.slots][::2])
        train(model, pool, sgd(model), range(2))
    assert orders == [[2, 1, 4, 0, 3], [4, 3, 2, 1, 0]]


# Pools that nobody closes


@pytest.mark.parametrize("engine", tiers(["lazy int8", "dear", "sparse"], ["lazy", "ring", "hybrid", "auto"]))
@with_ranks(2)
@unmeasured()
def test_a_pool_that_nobody_closes_is_freed_with_its_model(engine: str) -> None:
    """When everything that a user had of it is gone."""
    model = Layers()
    pool = GradientPool(model, ENGINES[engine], topology=lending())
    optimizer = loops.ours(model)
    train(model, pool, optimizer, range(2))
    pool.settle()
    known = weakref.ref(model)
    del model, pool, optimizer
    until = time.monotonic() + 10
    while gc.collect() >= 0 and known() is not None and time.monotonic() < until:
        time.sleep(0.01)  # sparse's thread may still send what chooses the next chunks
    assert known() is None


@with_ranks(2)
def test_an_optimizer_outlives_its_pools_without_them() -> None:
    model = Layers()
    optimizer, seen = sgd(model), []
    for _ in range(3):
        with closing(GradientPool(model, ENGINES["dear"], topology=lending())) as pool:
            seen.append(weakref.ref(pool))
            train(model, pool, optimizer, range(2))
        del pool
    gc.collect()
    assert optimizer.state_dict()["param_groups"]
    assert [ref() for ref in seen] == [None] * 3
