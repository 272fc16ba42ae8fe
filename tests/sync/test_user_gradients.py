"""What users do to ``p.grad`` is what the step applies, on every rank, or it is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import EngineSettings, GradientPool
from tests.ranks import run
from tests.sync.loops import (
    DEAR,
    HYBRID,
    LAZY,
    Layers,
    alike,
    average_by_hand,
    end_step,
    images,
    loss_of,
    pooled,
    state,
    trained,
)

ENGINES = (HYBRID, DEAR, LAZY)
IDS = ["hybrid", "dear", "lazy"]


class Partly(Layers):
    """Of its layers, 1 is used by nobody in even steps, by rank 1 alone in odd ones; 3 is used by nobody."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(5):
            if number == 3 or (number == 1 and not self.uses_one):
                continue
            x = self.get_submodule(f"layer{number}")(x).tanh()
        return x

    uses_one = False


Edit = Callable[[nn.Module], object]


def cancel(model: nn.Module) -> None:
    for name in ("layer1", "layer4"):
        for param in model.get_submodule(name).parameters():
            param.grad = None


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = (param.grad / 3).clamp(-0.01, 0.01)


def loop(
    settings: EngineSettings | None, before: Edit | None = None, after: Edit | None = None, by_optimizer: bool = False
) -> dict[str, Tensor]:
    """Weights after six steps, by hand or with an engine. ``before`` happens between backward and ``finish``."""

    def backward(model: Partly, pool: GradientPool | None, step: int) -> None:
        model.uses_one = step % 2 == 1 and dist.get_rank() == 1
        loss_of(model, step).backward()
        if before is not None:
            before(model)

    def end(pool: GradientPool | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if pool is None:
            average_by_hand(model)
        elif after is not None or by_optimizer:
            pool.finish()
        if after is not None:
            after(model)
        if pool is None or by_optimizer:
            optimizer.step()
        else:
            pool.step(optimizer)

    return trained(settings, Partly, optimizer_of=adamw, backward=backward, end=end)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def check_as_by_hand(train: Callable[[EngineSettings | None], dict[str, Tensor]]) -> None:
    """With every engine ``train`` gives the weights that it gives by hand (None)."""
    expected = train(None)
    for settings in ENGINES:
        assert alike(train(settings), expected), settings


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_none_before_finish_and_any_change_after_it_are_honoured():
    run(2, _honoured)


def _honoured() -> None:
    edits: list[dict[str, Any]] = [
        {}, {"before": cancel}, {"after": cancel}, {"after": clip}, {"after": replace}, {"by_optimizer": True},
        {"after": clip, "by_optimizer": True},
    ]  # fmt: skip
    for edit in edits:
        expected = loop(None, **{name: value for name, value in edit.items() if name != "by_optimizer"})
        for settings in ENGINES:
            assert alike(loop(settings, **edit), expected), (settings, edit)


def test_losses_of_disjoint_layers_may_have_backwards_of_their_own():
    """Without ``no_sync``; between them a gradient of the first is cancelled, which must not reach what is sent."""
    run(2, _disjoint)


def _disjoint() -> None:
    def backward(model: Layers, pool: GradientPool | None, step: int) -> None:
        first = model.layer1(model.layer0(images(step)).tanh())
        first.square().sum().backward()
        model.layer0.bias.grad = None
        second = model.layer4(model.layer3(images(50 + step)).tanh())
        second.square().sum().backward()

    check_as_by_hand(partial(trained, optimizer_of=adamw, steps=5, backward=backward))


def test_zeroing_on_the_way_is_a_gradient_of_zero():
    run(2, _zeroed)


def _zeroed() -> None:
    def zero(model: nn.Module) -> None:
        model.zero_grad(set_to_none=False)

    check_as_by_hand(partial(loop, before=zero))


def test_gradients_of_autograd_grad_are_sent():
    run(2, _given)


def _given() -> None:
    def backward(model: Layers, pool: GradientPool | None, step: int) -> None:
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(model, step), params), strict=True):
            param.grad = 2 * grad

    check_as_by_hand(partial(trained, optimizer_of=momentum_sgd, steps=5, backward=backward))


@pytest.mark.parametrize("settings", ENGINES, ids=IDS)
def test_using_a_gradient_on_its_way_is_refused_in_words(settings: EngineSettings):
    model = Layers()
    pool = pooled(model, settings)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    uses: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(params, 1.0), lambda: nn.utils.clip_grad_value_(params, 1.0), optimizer.step,
        lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer), lambda: params[0].grad.norm(),
        lambda: params[0].grad.mul_(2), lambda: params[0].grad / 2, lambda: params[0].grad.clone(),
        lambda: params[0].grad[0], lambda: params[0].grad.data, lambda: torch._foreach_norm([p.grad for p in params]),
    ]  # fmt: skip
    pool.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    before = state(model)
    for use in uses:
        with pytest.raises(RuntimeError, match=r"on its way to the other ranks; call pool\.finish\(\)"):
            use()
    assert params[0].grad.shape == params[0].shape
    assert "on its way" in repr(params[0].grad)
    assert alike(state(model), before)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"layer0\.weight was replaced while .* call pool\.finish\(\)"):
        pool.finish()
    pool.close()


@pytest.mark.parametrize("settings", ENGINES, ids=IDS)
def test_dropping_gradients_that_all_had_left_warns(settings: EngineSettings):
    model = Layers()
    pool = pooled(model, settings)
    pool.zero_grad()
    loss_of(model, 0).backward()
    with pytest.warns(UserWarning, match=r"end each step with pool\.step\(optimizer\) or pool\.finish\(\)"):
        pool.zero_grad()
    pool.close()


def test_a_layer_first_used_in_a_later_micro_step_is_updated_alike():
    """Nobody uses layer 1 in a step, and in the next one rank uses it in its second micro-step alone."""
    run(2, _late)


def _late() -> None:
    def backward(model: Partly, pool: GradientPool | None, step: int) -> None:
        for micro_step in range(3):
            late = step % 2 == 1 and dist.get_rank() == 1 and micro_step == 1
            model.uses_one = step < 2 or late  # first by all, so that its update waits for its forward
            loss = loss_of(model, 3 * step + micro_step)
            with nullcontext() if pool is None or micro_step == 2 else pool.no_sync():
                loss.backward()

    check_as_by_hand(partial(trained, build=Partly, optimizer_of=momentum_sgd, steps=8, backward=backward))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        score: Tensor = self.net(x)
        return score


@pytest.mark.parametrize("guarded", [False, True])
def test_dcgan_trains_as_by_hand(guarded: bool):
    """PyTorch's tutorial: the generator's backward goes through the discriminator, whose next step forgets it."""
    run(2, _dcgan, guarded)


def _dcgan(guarded: bool) -> None:
    def adversaries(settings: EngineSettings | None) -> dict[str, Tensor]:
        maker, critic = Layers(), Critic()
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (critic, maker)]
        pools: list[GradientPool] = [] if settings is None else [pooled(m, settings) for m in (critic, maker)]

        def step(which: int, model: nn.Module) -> None:
            end_step(pools[which] if pools else None, model, optimizers[which])

        for number in range(5):
            (pools or optimizers)[0].zero_grad()
            real = critic(images(number)).mean()
            if pools:
                with pools[0].no_sync():
                    real.backward()
            else:
                real.backward()
            fake = maker(images(100 + number))
            critic(fake.detach()).square().mean().backward()
            step(0, critic)
            (pools or optimizers)[1].zero_grad()
            loss = -critic(fake).mean()
            if pools and guarded:
                with pools[0].no_sync():
                    loss.backward()
            else:
                loss.backward()
            step(1, maker)
        for pool in pools:
            pool.close()
        return state(maker) | {f"critic.{name}": value for name, value in state(critic).items()}

    check_as_by_hand(adversaries)


@pytest.mark.parametrize("settings", ENGINES, ids=IDS)
def test_parameters_that_are_in_no_pool_are_refused_in_words(settings: EngineSettings):
    def refuse(change: Callable[[Layers], nn.Module | None], words: str, kind: type[Exception]) -> None:
        model = Layers()
        model.layer0.requires_grad_(False)
        pool = pooled(model, settings)
        other = change(model)
        params = [*model.parameters(), *(() if other is None else other.parameters())]
        optimizer = torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)
        pool.zero_grad()
        loss = loss_of(model, 0)
        if other is not None:
            loss = loss + other(images(0)).sum()
        loss.backward()
        with pytest.raises(kind, match=words):
            pool.step(optimizer)
        pool.close()

    def unfreeze(model: Layers) -> None:
        model.layer0.requires_grad_(True)

    def new_head(model: Layers) -> None:
        model.layer4 = nn.Linear(8, 8)

    def assign(model: Layers) -> None:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        model.layer0.requires_grad_(False)

    def parametrize(model: Layers) -> None:
        nn.utils.parametrizations.weight_norm(model.layer2)

    nothing_pooled = "none of this pool's parameters"
    refuse(unfreeze, "in no gradient pool", ValueError)
    refuse(new_head, "in no gradient pool", ValueError)
    refuse(parametrize, "in no gradient pool", ValueError)
    refuse(assign, "in no gradient pool", ValueError)
    refuse(lambda model: nn.Linear(8, 8), "in no gradient pool", ValueError)
    model = Layers()
    pool = pooled(model, settings)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    pool.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=nothing_pooled):
        pool.step(torch.optim.SGD(copies, lr=0.1))
    pool.close()


@pytest.mark.parametrize("settings", ENGINES, ids=IDS)
def test_finish_refuses_a_model_whose_parameters_changed(settings: EngineSettings):
    """Also for whoever calls the optimizer's own step."""
    model = Layers()
    pool = pooled(model, settings)
    model.layer4 = nn.Linear(8, 8)
    pool.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"layer4\.weight has a gradient but is in no gradient pool"):
        pool.finish()
    pool.close()
    pool = pooled(model, settings)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    pool.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"layer4\.bias is no longer the parameter"):
        pool.finish()
    pool.close()


def test_a_second_pool_needs_the_first_one_closed():
    model = Layers()
    first = GradientPool(model)
    with pytest.raises(ValueError, match=r"is in another gradient pool; close\(\) that one"):
        GradientPool(model.layer1)
    first.close()
    GradientPool(model.layer1).close()
