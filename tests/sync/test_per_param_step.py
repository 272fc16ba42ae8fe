"""An optimizer's step in parts is its step at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from imagenet_fast.sync.per_param_step import needs_all, snapshot_step
from tests.conftest import tiers

STEPS = 5
SHAPES = ((7, 5), (5,), (4, 3, 3, 3), (1,), (40, 17), (33,))

PLAIN: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw amsgrad": (optim.AdamW, {"amsgrad": True}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "nadam": (optim.NAdam, {"decoupled_weight_decay": True}),
}
PLAIN |= {
    kind.__name__.lower(): (kind, {})
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RAdam, optim.Adamax, optim.Adadelta, optim.ASGD, optim.Rprop,
                 optim.Adafactor, optim.Muon)
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "in a loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "a tensor as rate": {"lr": 0.05},  # made anew for each optimizer, since a schedule changes it
}
FUSED = {"sgd", "sgd momentum", "sgd nesterov", "adam", "adamw", "adamw amsgrad", "adagrad"}
REFUSED = {("adafactor", "a tensor as rate"), *(("muon", way) for way in ("in a loop", "foreach", "maximize"))}


def parameters(name: str = "sgd") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES if name != "muon" or len(shape) == 2]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for number, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = None if step == 2 and number == 1 else gradient  # a layer that one step does not use


Apply = Callable[[list[nn.Parameter]], None]


def put_off(optimizer: Optimizer, params: list[nn.Parameter], step: int = 0) -> Apply:
    """A step that has its gradients and is carried out later."""
    give_gradients(params, step)
    return snapshot_step(optimizer)


def equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def built(name: str, way: str, params: list[nn.Parameter]) -> Optimizer:
    kind, settings = PLAIN[name]
    settings = settings | WAYS[way]
    if way == "a tensor as rate":
        settings["lr"] = torch.tensor(0.05)
    rate = settings.setdefault("lr", 0.05)
    slow = rate.clone() / 4 if isinstance(rate, Tensor) else rate / 4
    decay = {} if kind is optim.Rprop else {"weight_decay": 0.01}
    return kind([{"params": params[::2], "lr": slow}, {"params": params[1::2], **decay}], **settings)


def step_schedule(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """It moves momentum, or the first beta, as well."""
    moves = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    moves = moves and bool(optimizer.defaults.get("momentum", 1))
    return OneCycleLR(optimizer, [0.01, 0.1], total_steps=STEPS + 1, cycle_momentum=moves)


Schedule = Callable[[Optimizer], LRScheduler]


def at_once(optimizer: Optimizer, params: list[nn.Parameter], schedule: Schedule) -> list[Tensor]:
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        give_gradients(params, step)
        optimizer.step()
        scheduler.step()
    return everything(optimizer, params)


def in_parts(optimizer: Optimizer, params: list[nn.Parameter], schedule: Schedule) -> list[Tensor]:
    scheduler, order = schedule(optimizer), random.Random(0)
    for step in range(STEPS):
        apply = put_off(optimizer, params, step)
        scheduler.step()
        left = order.sample(params, len(params))
        for begin in range(0, len(left), 2):
            apply(left[begin : begin + 2])
    return everything(optimizer, params)


def everything(optimizer: Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Weights, and all that the optimizer keeps of them."""
    states = [optimizer.state[param] for param in params]
    return [p.detach() for p in params] + [torch.as_tensor(state[key]) for state in states for key in sorted(state)]


CASES = [
    (name, way, schedule)
    for name, way, schedule in product(PLAIN, WAYS, (step_schedule, one_cycle))
    if (way != "fused" or name in FUSED) and (name, way) not in REFUSED
]


@pytest.mark.filterwarnings("error:.*lr_scheduler:UserWarning")
@pytest.mark.parametrize(("name", "way", "schedule"), tiers(CASES[::3], CASES))
def test_layer_by_layer_in_any_order_is_all_at_once_to_the_bit(name: str, way: str, schedule: Schedule):
    """With a schedule that moves on before the first layer is due, and does not warn that it is early."""
    params, others = parameters(name), parameters(name)
    before = [param.detach().clone() for param in params]
    expected = at_once(built(name, way, params), params, schedule)
    assert equal(expected, in_parts(built(name, way, others), others, schedule))
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))


def test_every_kind_that_is_updated_in_parts_is_tried():
    kinds = {kind for kind, _ in PLAIN.values()}
    known = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    for kind in known - {Optimizer, optim.LBFGS, optim.SparseAdam}:
        assert needs_all(kind(parameters("muon"))) is (kind not in kinds), kind


def sgd_put_off() -> tuple[list[nn.Parameter], optim.SGD, Apply]:
    """Parameters, their optimizer, and its first step."""
    params = parameters()
    optimizer = optim.SGD(params, lr=0.1)
    return params, optimizer, put_off(optimizer, params)


def test_betas_that_are_tensors_are_copied_too():
    params, others = parameters(), parameters()
    betas, same = ((torch.tensor(0.9), torch.tensor(0.99)) for _ in range(2))
    apply = put_off(optim.AdamW(params, foreach=False, betas=betas), params)
    betas[0].fill_(0.1)
    apply(params)
    put_off(optim.AdamW(others, foreach=False, betas=same), others)(others)
    assert equal(params, others)


def test_parameters_of_others_are_left_alone():
    params = parameters()
    before = [param.detach().clone() for param in params]
    apply = put_off(optim.SGD(params[:2], lr=0.1), params)
    apply(params[2:])
    apply(params[1:])
    changed = [not torch.equal(param, old) for param, old in zip(params, before, strict=True)]
    assert changed == [False, True, False, False, False, False]


def test_add_param_group_while_an_update_is_deferred():
    params, others = parameters(), parameters()
    for chosen, parts in ((params, (slice(3, 6), slice(0, 3))), (others, ())):
        optimizer = optim.AdamW(chosen[:4], lr=0.1)
        apply = put_off(optimizer, chosen)
        if not parts:
            apply(chosen)
        optimizer.add_param_group({"params": chosen[4:], "lr": 0.01})
        for part in parts:
            apply(chosen[part])
        apply = put_off(optimizer, chosen, 1)
        for param in chosen:
            apply([param])
    assert equal(params, others)


@pytest.mark.parametrize("before", [False, True], ids=["", "after one of a time before there was a schedule"])
def test_a_scheduler_still_warns_when_it_is_really_first(before: bool):
    optimizer = optim.SGD(parameters(), lr=0.1)
    if before:
        snapshot_step(optimizer)  # which torch does not count either
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        step_schedule(optimizer).step()


def test_hooks_run_once_a_step_and_see_all_of_it():
    params = parameters()
    optimizer = optim.SGD(params, lr=0.1)
    seen: list[str] = []
    step_schedule(optimizer)
    assert not needs_all(optimizer), "a scheduler's wrapper of step changes nothing"
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    assert needs_all(optimizer)
    optimizer.register_step_post_hook(lambda here, *_: seen.append(f"after {len(here.param_groups[0]['params'])}"))
    put_off(optimizer, params)(params)
    with pytest.raises(RuntimeError, match=r"SGD updates its parameters all at once, but 2 that have a gradient"):
        snapshot_step(optimizer)(params[2:])
    assert seen == ["before", "after 6"]

    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    other = optim.SGD(params, lr=0.1)
    assert needs_all(other)
    handle.remove()
    assert not needs_all(other)


def test_a_hook_that_comes_after_a_step_is_not_for_it():
    params, optimizer, apply = sgd_put_off()
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for param in params:
        apply([param])
    assert not seen
    snapshot_step(optimizer)(params)
    assert seen == [1]


def test_a_part_has_the_name_of_a_step_in_profiles():
    params, _, apply = sgd_put_off()
    with torch.profiler.profile() as profile:
        apply(params[:1])
        apply(params[1:])
    assert [event.name for event in profile.events()].count("Optimizer.step#SGD.step") == 2


class Own(optim.SGD):
    """Somebody's, of which nobody knows whether it updates parameters one by one."""


def test_custom_optimizer_at_once_unless_one_by_one():
    params = parameters()
    before = params[0].detach().clone()
    optimizer = Own(params, 0.5)
    assert needs_all(optimizer)
    with pytest.raises(RuntimeError, match="Own"):
        put_off(optimizer, params)(params[:1])
    optimizer.one_by_one = True
    assert not needs_all(optimizer)
    apply = snapshot_step(optimizer)
    optimizer.param_groups[0]["lr"] = 100.0
    apply(params[:1])
    assert torch.equal(params[0], before - 0.5 * params[0].grad)


def test_replaced_step_of_an_optimizer_is_called():
    params, optimizer, _ = sgd_put_off()
    stepped: list[int] = []
    optimizer.step = lambda: stepped.append(1)
    assert needs_all(optimizer)
    snapshot_step(optimizer)(params)
    assert stepped == [1]


class Searching(Own):
    def step(self, closure: Callable[[], float]) -> None:
        closure()


@pytest.mark.parametrize("kind", [optim.LBFGS, Searching])
def test_a_step_that_requires_a_closure_is_refused(kind: type[Optimizer]):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.step\(\) requires a closure .* take an optimizer"):
        snapshot_step(kind(parameters(), 0.5))


class Counting(Own):
    one_by_one = True

    def step(self, closure: object = None) -> None:
        super().step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def test_an_optimizer_that_counts_in_its_groups_is_refused_unless_it_is_run_at_once():
    params = parameters()
    optimizer = Counting(params, 0.5)
    with pytest.raises(RuntimeError, match=r"Counting counts .* keep such counts in optimizer\.state.*one_by_one"):
        put_off(optimizer, params)(params[:1])
    optimizer.one_by_one = False
    put_off(optimizer, params)(params)
