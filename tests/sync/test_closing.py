"""A pool that is closed in `finally`, after a step that one rank left half done: nobody waits, nothing is hidden."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.sync import AutoSync, EngineSettings, LazySync, RingSync, SparseSync
from tests.ranks import run
from tests.sync.loops import DEAR, HYBRID, LAZY, Layers, alike, loss_of, pooled, sgd, state, take_step, unmeasured

SPARSE = SparseSync(wire="fp32", sparsity=0.5, chunk=16, ramp_epochs=0)
ENGINES: tuple[EngineSettings, ...] = (
    LAZY, LazySync(wire="int8"), RingSync(wire="fp32"), HYBRID, DEAR, SPARSE, AutoSync(wire="fp32"),
)  # fmt: skip


class UsersError(Exception):
    pass


def test_close_in_an_unfinished_step_waits_for_no_rank():
    assert run(2, _closed_in_finally) == [[["UsersError"] * 2] * len(ENGINES)] * 2


def _closed_in_finally() -> list[list[str]]:
    told = []
    with unmeasured():
        for settings in ENGINES:
            told.append([_fails(settings, 3, early) for early in (0, 1)])
            model = Layers()  # other pools can be made, and train
            pool, optimizer = pooled(model, LAZY), sgd(model)
            pool.zero_grad()
            loss_of(model, 0).backward()
            pool.step(optimizer)
            pool.close()
    return told


def _fails(settings: EngineSettings, fails: int, early: int) -> str:
    """In a step in which rank ``early`` fails before its gradients have come, and the other after it has sent them."""
    model = Layers()
    pool, optimizer = pooled(model, settings), sgd(model)
    try:
        try:
            for step in range(fails + 1):
                pool.zero_grad()
                loss = loss_of(model, step)
                if step == fails and dist.get_rank() == early:
                    raise UsersError
                loss.backward()
                if step == fails:
                    raise UsersError
                if isinstance(settings, SparseSync):
                    pool.finish()
                else:
                    take_step(pool, optimizer, settings)
        finally:
            pool.close()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_failing_close_is_a_note_on_the_users_exception():
    model = Layers()
    pool, optimizer = pooled(model, HYBRID), sgd(model)

    def failing_update(params: list[nn.Parameter]) -> None:
        raise MemoryError("no memory for the update")

    for step in range(3):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.end_backward()
        pool.update(failing_update if step == 2 else lambda params: optimizer.step())

    def fails() -> None:
        try:
            raise UsersError
        finally:
            pool.close()

    with pytest.raises(UsersError) as raised:
        fails()
    assert any("no memory for the update" in note for note in raised.value.__notes__)
    assert not any(module._forward_pre_hooks for module in model.modules()), "the model is left to others"


def test_a_pool_that_is_closed_between_steps_settles():
    weights = []
    for settings in (LAZY, HYBRID):
        torch.manual_seed(0)
        model = Layers()
        pool, optimizer = pooled(model, settings), sgd(model)
        for step in range(4):
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.step(optimizer)
        pool.close()
        weights.append(state(model))
    assert alike(*weights)


def test_a_pool_that_nobody_closes_is_freed_with_its_model():
    assert run(2, _left_without_close) == [[]] * 2


def _left_without_close() -> list[str]:
    """The engines whose model is still there after everything that a user had of it is gone."""
    kept = []
    with unmeasured():
        for settings in ENGINES:
            model = Layers()
            pool, optimizer = pooled(model, settings), sgd(model)
            for step in range(2):
                pool.zero_grad()
                loss_of(model, step).backward()
                take_step(pool, optimizer, settings)
            pool.settle()
            known = weakref.ref(model)
            del model, pool, optimizer
            until = time.monotonic() + 10
            while gc.collect() >= 0 and known() is not None and time.monotonic() < until:
                time.sleep(0.01)  # sparse's thread may still send what chooses the next chunks
            if known() is not None:
                kept.append(repr(settings))
    return kept
