"""Parameters that lie oddly in memory, are not used, or are registered in another order than they are read."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from imagenet_fast.sync import AutoSync, DdpSync, EngineSettings, GradientPool
from imagenet_fast.training import optimizers
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
    pooled,
    state,
    trained,
)

ODDLY = (3, 0, 4, 1, 2)


class Oddments(nn.Module):
    """Parts of larger tensors, which are nobody's to change, and transposed ones; with ``doubled`` one whose elements
    share memory."""

    def __init__(self, doubled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.series = torch.randn(8, 12), torch.randn(20)
        self.cut = nn.Parameter(self.whole.chunk(2, 1)[0])
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.every_other = nn.Parameter(self.series[::2])
        if doubled:
            self.doubled = nn.Parameter(torch.randn(3, 1).expand(3, 5))
        self.plain = nn.Parameter(torch.randn(6))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        terms = [(p.square() * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters()]
        return torch.stack(terms).sum()


@pytest.mark.parametrize("settings", EXACT, ids=lambda settings: settings.kind)
def test_every_gradient_is_its_own_however_its_parameter_lies_in_memory(settings: EngineSettings):
    model, expected = Oddments(doubled=True), Oddments(doubled=True)
    pool = pooled(model, settings)
    for step in range(3):
        pool.zero_grad()
        model(step).backward()
        pool.end_backward()
        seen: dict[nn.Parameter, Tensor] = {}
        pool.update(lambda params, elements=None, seen=seen: seen.update((p, p.grad.clone()) for p in params))
        pool.settle()
        expected.zero_grad()
        expected(step).backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(seen[ours], theirs.grad)


@pytest.mark.parametrize("settings", [*DEFERRING, LAZY], ids=lambda settings: settings.kind)
def test_a_part_of_a_tensor_is_trained_and_the_rest_of_it_left_alone(settings: EngineSettings):
    model, expected, untouched = (Oddments(doubled=False) for _ in range(3))
    pool, optimizers = pooled(model, settings), [SGD(m.parameters(), 0.01, 0.9) for m in (model, expected)]
    for step in range(3):
        pool.zero_grad()
        model(step).backward()
        pool.step(optimizers[0])
        optimizers[1].zero_grad()
        expected(step).backward()
        optimizers[1].step()
    pool.settle()
    assert alike(state(model), state(expected))
    assert not torch.equal(model.cut, untouched.cut)
    assert torch.equal(model.whole[:, 6:], untouched.whole[:, 6:])
    assert torch.equal(model.series[1::2], untouched.series[1::2])


class Idle(nn.Module):
    """One layer may have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.idle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, works: bool) -> Tensor:
        x = self.first(x).tanh()
        out: Tensor = self.last(self.idle(x).tanh() if works else x)
        return out


WORKS = ([0, 1], [], [], [1], [], [0, 1], [], [0])
"""In which step on which ranks."""


def torch_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 0.01, weight_decay=0.1)


def momentum_sgd(model: nn.Module) -> Optimizer:
    return optimizers.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1)


def lars(model: nn.Module) -> Optimizer:
    return optimizers.LARS(model.parameters(), 0.1, 0.9, 0.1, trust_coefficient=0.01, eps=1e-9)


def test_a_parameter_that_no_rank_uses_stands_still():
    """It is not decayed, nor moved on by its momentum, and used again it goes on as by hand."""
    run(2, _unused)


def _unused() -> None:
    for build, engines in (
        (torch_sgd, EXACT),
        (adamw, DEFERRING),
        (momentum_sgd, (HYBRID, LAZY)),
        (lars, (DEAR, LAZY)),
    ):
        together = partial(trained, build=Idle, loss=idle_loss, optimizer_of=build, steps=len(WORKS))
        expected = together(None)
        for settings in engines:
            assert alike(together(settings), expected), (build.__name__, settings)


def idle_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(images(step), dist.get_rank() in WORKS[step]).square().sum()
    return loss


def test_the_pool_learns_in_which_order_gradients_come():
    run(2, _oddly_registered)


def _oddly_registered() -> None:
    def check_order(pool: GradientPool | None, model: object, optimizer: object, step: int) -> None:
        if pool is not None:
            layers = list(dict.fromkeys(slot.layer for slot in pool.slots))
            at_first = ["layer2", "layer1", "layer4", "layer0", "layer3"]
            assert layers == (at_first if step == 0 else sorted(layers)[::-1])

    together = partial(trained, build=partial(Layers, ODDLY), after=check_order, steps=8)
    expected = together(DdpSync(wire="fp32"))
    for settings in (HYBRID, LAZY, DENSE, AutoSync(wire="fp32")):
        for name, weight in together(settings).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=str(settings))
