"""Loops that do not go as the pool expects: right all the same, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imagenet_fast.sync import EngineSettings, GradientPool, build_engine
from tests.ranks import run
from tests.sync.loops import (
    DEAR,
    DEFERRING,
    DENSE,
    EXACT,
    HYBRID,
    LAZY,
    Layers,
    alike,
    images,
    loss_of,
    pooled,
    sgd,
    state,
    take_step,
    take_steps_together,
    trained,
)

ALL = pytest.mark.parametrize("settings", [*DEFERRING, LAZY], ids=["hybrid", "dear", "lazy"])


def evaluate(pool: GradientPool, model: nn.Module, *_: object) -> None:
    with torch.inference_mode():
        model(images(99))


def evaluate_a_part(pool: GradientPool, model: nn.Module, *_: object) -> None:
    with torch.no_grad():
        model.get_submodule("layer3")(images(99))
        model.get_submodule("layer0")(images(99))


@ALL
def test_a_second_backward_in_a_step_is_refused_in_words(settings: EngineSettings):
    model = Layers()
    pool = pooled(model, settings)
    pool.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"a second backward .*no_sync\(\)"):
        loss_of(model, 1).backward()


@ALL
def test_the_optimizers_zero_grad_does_in_place_of_the_pools(settings: EngineSettings):
    model = Layers()
    pool, optimizer = pooled(model, settings), sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)
    pool.settle()
    assert alike(state(model), trained(settings))


@ALL
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_by_the_optimizer_as_well_are_not_lost(settings: EngineSettings, to_none: bool):
    def zero(pool: GradientPool, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        model.zero_grad(set_to_none=to_none)

    assert alike(trained(settings, before=zero), trained(settings))
    assert alike(trained(settings, after=zero), trained(settings))


@ALL
@pytest.mark.parametrize("look", [evaluate, evaluate_a_part])
def test_evaluating_anywhere_in_a_step_changes_nothing(
    settings: EngineSettings, look: Callable[[GradientPool, nn.Module], None]
):
    model = Layers()
    pool, optimizer = pooled(model, settings), sgd(model)
    for step in range(6):
        look(pool, model)
        pool.zero_grad()
        look(pool, model)
        loss = loss_of(model, step)
        look(pool, model)
        loss.backward()
        look(pool, model)
        pool.finish()
        look(pool, model)
        pool.step(optimizer)
        look(pool, model)
    pool.settle()
    assert alike(state(model), trained(settings))


@ALL
@pytest.mark.parametrize("between", [None, evaluate, evaluate_a_part])
def test_two_optimizers_of_a_step_both_update(
    settings: EngineSettings, between: Callable[[GradientPool, nn.Module], None] | None
):
    model = Layers()
    pool, params = pooled(model, settings), list(model.parameters())
    optimizers = [sgd(nn.ParameterList(params[:5])), sgd(nn.ParameterList(params[5:]))]
    for step in range(6):
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizers[0])
        if between is not None:
            between(pool, model)
        pool.step(optimizers[1])
    pool.settle()
    assert alike(state(model), trained(settings))


@ALL
def test_an_exception_in_forward_loses_no_update(settings: EngineSettings):
    def fail(pool: GradientPool, model: nn.Module, *_: object) -> None:
        hook = model.get_submodule("layer2").register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(images(99))
        hook.remove()

    assert alike(trained(settings, before=fail), trained(settings))


@ALL
def test_a_closed_pool_leaves_the_model_to_others(settings: EngineSettings):
    model = Layers()
    optimizer = sgd(model)
    for step in range(6):
        if step in (0, 2):
            pool = pooled(model, settings)
        if step < 4:
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.step(optimizer)
        if step in (1, 3):
            pool.close()
            pool.close()
        if step >= 4:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert alike(state(model), trained(settings))
    assert vars(model).keys() == vars(Layers()).keys()
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("settings", EXACT, ids=lambda settings: settings.kind)
def test_a_step_can_be_finished_twice(settings: EngineSettings):
    results = []
    for times in (1, 2):
        model = Layers()
        pool, optimizer = pooled(model, settings), sgd(model)
        for step in range(4):
            pool.zero_grad()
            loss_of(model, step).backward()
            stats = [pool.finish() for _ in range(times)]
            assert stats[0] is stats[-1]
            take_step(pool, optimizer, settings)
        pool.settle()
        results.append(state(model))
    assert alike(*results)


@ALL
def test_accumulated_gradients_are_those_of_one_backward(settings: EngineSettings):
    results = []
    for parts in (1, 3):
        model = Layers()
        pool, optimizer = pooled(model, settings), sgd(model)
        for step in range(4):
            batch = torch.cat([images(3 * step + part) for part in range(3)]).chunk(parts)
            pool.zero_grad()
            for micro_batch in batch[:-1]:
                with pool.no_sync():
                    model(micro_batch).square().sum().backward()
            model(batch[-1]).square().sum().backward()
            pool.step(optimizer)
        pool.settle()
        results.append(state(model))
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name])


def test_a_step_that_is_not_applied_leaves_no_trace():
    """While its gradients are still on their way, the next step's come."""
    run(2, _not_applied)


def _not_applied() -> None:
    for settings in DEFERRING:
        results = []
        for backwards in ((0, 1, 2, 3, 4, 5), (0, 1, 2, 4, 5)):
            model = Layers()
            pool, optimizer = pooled(model, settings), sgd(model)
            for step in backwards:
                pool.zero_grad()
                loss_of(model, step).backward()
                pool.finish()
                if step != 3:
                    pool.step(optimizer)
            pool.close()
            results.append(state(model))
        assert alike(*results), settings


def test_an_engine_can_be_exchanged_and_two_pools_can_share_a_model():
    run(2, _several_engines)


def _several_engines() -> None:
    expected = trained(LAZY, steps=6)
    for settings in (*DEFERRING, LAZY):
        for plan in (
            {0: settings, 2: settings},
            {0: settings, 2: LAZY, 4: settings},
            {0: settings, 2: DENSE, 4: HYBRID},
        ):
            assert alike(exchanging(plan), expected), plan
    for pair in ((HYBRID, HYBRID), (LAZY, DEAR), (HYBRID, LAZY)):
        assert alike(shared(pair), expected), pair


def exchanging(plan: Mapping[int, EngineSettings]) -> dict[str, Tensor]:
    """Which engine from which step on."""
    model = Layers()
    pool, optimizer = GradientPool(model), sgd(model)
    for step in range(6):
        if step in plan:
            settings = plan[step]
            pool.attach(build_engine(settings, pool))
        pool.zero_grad()
        loss_of(model, step).backward()
        take_step(pool, optimizer, settings)
    pool.close()
    return state(model)


def shared(pair: Sequence[EngineSettings]) -> dict[str, Tensor]:
    """Trained by a pool for the first half of the parameters and a pool for the second."""
    model = Layers()
    named = list(model.named_parameters())
    pools = [GradientPool(some, model=model) for some in (named[:5], named[5:])]
    for pool, settings in zip(pools, pair, strict=True):
        pool.attach(build_engine(settings, pool))
    optimizer = sgd(model)
    take_steps_together(pools, model, optimizer, 6)
    for pool in pools:
        pool.close()
    return state(model)
