"""What a pool cannot do is refused by a sentence that says what to do instead; what looks odd and can be done is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_fast.sync import (
    AutoSync,
    Engine,
    EngineSettings,
    GradientPool,
    LazySync,
    PowerSgdSync,
    SparseSync,
    attach,
    build_engine,
)  # fmt: skip
from tests.sync.loops import (
    DEAR,
    DENSE,
    HYBRID,
    LAZY,
    Layers,
    alike,
    loss_of,
    pooled,
    sgd,
    state,
    take_step,
    trained,
    unmeasured,
)


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", [LAZY, HYBRID, DEAR], ids=["lazy", "hybrid", "dear"])
def test_a_compiled_model_is_pooled_as_the_model_that_it_compiles(settings: EngineSettings):
    model = Layers()
    compiled = torch.compile(model, backend="eager")
    pool, optimizer = pooled(compiled, settings), sgd(model)
    assert {slot.name for slot in pool.slots} == dict(model.named_parameters()).keys()
    for number in range(5):
        pool.zero_grad()
        loss_of(compiled, number).backward()
        pool.step(optimizer)
    pool.close()
    assert alike(state(model), trained(LAZY, steps=5))


@pytest.mark.parametrize("wrap", [iter, list])
def test_parameters_without_names_are_refused(wrap: Callable[[Any], Any]):
    with pytest.raises(TypeError, match=r"parameters have no names; give the pool the model.*named_parameters"):
        GradientPool(wrap(Layers().parameters()))


def test_two_parameters_of_one_name_are_refused():
    """Only one of them would be trained."""
    one, other = Layers(), Layers()
    with pytest.raises(ValueError, match=r"two parameters are named layer0\.weight; give each a name of its own"):
        GradientPool([*one.named_parameters(), *other.named_parameters()])
    named = list(one.named_parameters())
    assert len(GradientPool([*named, *named]).slots) == len(named), "of one parameter that is given twice"


@pytest.mark.filterwarnings("ignore:.*create_graph=True.*:UserWarning")
@pytest.mark.parametrize("settings", [LAZY, HYBRID, DENSE], ids=["lazy", "hybrid", "sparse"])
def test_create_graph_and_sparse_gradients_are_refused(settings: EngineSettings):
    def bent(penalised: bool) -> dict[str, torch.Tensor]:
        model = Layers()
        pool, optimizer = pooled(model, settings), sgd(model)
        for number in range(4):
            pool.zero_grad()
            loss = loss_of(model, number)
            if penalised and number == 2:
                with pytest.raises(RuntimeError, match=r"layer4\.\w+ .*create_graph=True.*torch\.autograd\.grad"):
                    loss.backward(create_graph=True)
                model.zero_grad()
                pool.zero_grad()
                loss = loss_of(model, number)
            loss.backward()
            take_step(pool, optimizer, settings)
        pool.settle()
        return state(model)

    if settings is LAZY or settings is HYBRID:
        assert alike(bent(True), bent(False))

    table = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    pool = pooled(table, settings)
    pool.zero_grad()
    with pytest.raises(RuntimeError, match=r"0\.weight is sparse.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()


INT8 = LazySync(wire="int8")
POWERSGD = PowerSgdSync(timing="lazy")
CORRECTED = SparseSync(wire="fp32", momentum_correction=True, momentum=0.9, chunk=16)
KEEPING = (LAZY, HYBRID, INT8, POWERSGD, DENSE, CORRECTED)


def kept(settings: EngineSettings) -> dict[str, Any]:
    """By a pool, after some steps."""
    model = Layers()
    pool, optimizer = pooled(model, settings), sgd(model)
    for number in range(3):
        pool.zero_grad()
        loss_of(model, number).backward()
        take_step(pool, optimizer, settings)
    return copy.deepcopy(pool.state_dict())


def test_a_state_that_another_engine_cannot_go_on_from_is_refused():
    states = {settings: kept(settings) for settings in KEEPING}
    for source, kept_ in states.items():
        for settings in KEEPING:
            pool = pooled(Layers(), settings)
            if (source.kind == "sparse") == (settings.kind == "sparse"):
                pool.load_state_dict(copy.deepcopy(kept_))
            else:
                with pytest.raises(ValueError, match=r"state is of another engine than .*; attach that engine"):
                    pool.load_state_dict(kept_)
    with pytest.raises(ValueError, match=r"is no state of a pool.*pool\.state_dict"):
        pooled(Layers(), LAZY).load_state_dict(Layers().state_dict())


def elected(chooser: AutoSync) -> tuple[nn.Module, GradientPool, torch.optim.Optimizer]:
    """Some steps after the choice."""
    model = Layers()
    pool, optimizer = pooled(model, chooser), sgd(model)
    for number in range(9):
        pool.zero_grad()
        loss_of(model, number).backward()
        pool.step(optimizer)
    return model, pool, optimizer


def test_the_state_of_auto_is_loaded_before_and_after_its_choice():
    chooser = AutoSync(wire="fp32")
    with unmeasured():
        model, pool, optimizer = elected(chooser)
        kept_, weights = copy.deepcopy(pool.state_dict()), state(model)
        assert kept_["elected"]
        momenta = copy.deepcopy(optimizer.state_dict())
        ends = []
        for fresh in (True, False):
            if fresh:
                again = Layers()
                loaded, other = pooled(again, chooser), sgd(again)
            else:
                again, loaded, other = elected(chooser)
            again.load_state_dict(weights)
            other.load_state_dict(copy.deepcopy(momenta))
            loaded.load_state_dict(copy.deepcopy(kept_))
            for number in range(3):
                loaded.zero_grad()
                loss_of(again, number).backward()
                loaded.step(other)
            loaded.settle()
            ends.append(state(again))
        assert alike(*ends)
        with pytest.raises(ValueError, match=r"auto had chosen .* attach auto"):
            pooled(Layers(), LAZY).load_state_dict(kept_)
        with pytest.raises(ValueError, match=r"auto had chosen butterflies.*which is not among"):
            pooled(Layers(), chooser).load_state_dict(kept_ | {"elected": "butterflies"})


def test_two_optimizers_with_one_scaler_update_it_once():
    """`pool.step` with a scaler updates it, so that of a second optimizer is refused; the loop by hand is as ever."""

    def halves() -> tuple[nn.Module, list[torch.optim.SGD], torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in model]
        return model, optimizers, torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)

    def by_hand(pool: GradientPool | None, model: nn.Module, optimizers: list[torch.optim.SGD], scaler: Any) -> None:
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        if pool is not None:
            pool.finish()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    model, (first, second), scaler = halves()
    pool = GradientPool(model)
    pool.attach(build_engine(LazySync(wire="fp32"), pool))
    pool.zero_grad()
    scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
    pool.step(first, scaler)
    with pytest.raises(ValueError, match=r"a second optimizer would be unscaled by the next step's scale; call pool"):
        pool.step(second, scaler)
    with pytest.raises(ValueError, match=r"call pool.finish\(\), scaler.step"):
        pool.step(second)
    pool.close()
    expected, model = halves(), halves()
    by_hand(None, *expected)
    pool = GradientPool(model[0])
    pool.attach(build_engine(LazySync(wire="fp32"), pool))
    pool.zero_grad()
    by_hand(pool, *model)
    pool.close()
    assert model[2].get_scale() == expected[2].get_scale() == 2.0**11
    for one, two in zip(model[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_model_whose_engine_could_not_be_built_is_free_for_another():
    model = nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError):
        attach(model, Engine(torch.float32, "backward", 1e6, group_key=lambda slot: 1 // 0))
    _, sync = attach(model, LazySync(wire="fp32"))
    sync.close()
