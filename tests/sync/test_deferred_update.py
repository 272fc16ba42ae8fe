"""Updates put off until the next forward are the updates made at once, to the bit."""

from __future__ import annotations

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.optim_config import Lars, Optim, Sgd
from imagenet_fast.sync import DearSync, GradientPool, HybridSync, build_engine
from imagenet_fast.sync.per_param_step import snapshot_step
from imagenet_fast.training.optimizers import build_optimizer
from tests.ranks import run
from tests.sync.loops import Bend, alike, at_once, nothing, trained

DEFERRING: tuple[HybridSync | DearSync, ...] = (
    HybridSync(wire="bf16", fuse_mb=0.001),
    HybridSync(wire="fp32", fuse_mb=0),
    HybridSync(wire="fp32", policy="by-size", fuse_mb=0.001),
    DearSync(wire="bf16", bucket_mb=0.001),
)
SGD = Sgd(kind="sgd", lr=0.1, weight_decay=1e-3)
LARS = Lars(kind="lars", lr=2.0, weight_decay=1e-3, trust_coefficient=0.01)


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 25, 32), nn.ReLU(), nn.Linear(32, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 3, 15, 15, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def train(settings: HybridSync | DearSync, optim: Optim, steps: int, after: Bend = nothing) -> dict[str, torch.Tensor]:
    """Weights and buffers after ``steps`` with a rising learning rate; ``after`` is called at the end of each."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images, labels = batch(step)
        return F.cross_entropy(model(images), labels)

    def warm_up(pool: object, model: object, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * (step + 1) / steps

    return trained(settings, convnet, loss, warm_up, after, partial(build_optimizer, optim), steps)


def test_deferred_training_is_synchronous_training_to_the_bit():
    run(3, _deferred_and_not)


LINKS = {"butterfly": LinkModel(1e-5, 1e-8), "ring": LinkModel(1e-4, 1e-9)}


@patch("imagenet_fast.sync.network_benchmark.measure_link", lambda name, *_: LINKS.get(name, LINKS["ring"]))
def _deferred_and_not() -> None:
    """With links as given: the two add in different orders, and a `by-size` that measures may choose anew."""
    for settings in DEFERRING:
        for optim in (SGD, LARS):
            synchronous = train(settings, optim, 12, at_once)
            deferred = train(settings, optim, 12)
            for name, tensor in synchronous.items():
                assert torch.equal(tensor, deferred[name]), (settings, name)


@pytest.mark.parametrize("settings", [HybridSync(wire="fp32", fuse_mb=1), DearSync(wire="fp32", bucket_mb=1)])
def test_what_came_together_is_updated_together(settings: HybridSync | DearSync):
    """Of 107 modules one by one, launches alone cost ResNet-50 8 times what one update of all costs."""
    model = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(20)))
    pool = GradientPool(model)
    pool.attach(build_engine(settings, pool))
    optimizer = build_optimizer(LARS, model)
    updates: list[int] = []

    def update(params: list[nn.Parameter], elements: object = None) -> None:
        updates.append(len(params))
        apply(params)

    for _ in range(8):
        updates.clear()
        pool.zero_grad()
        model(torch.ones(1, 1, 2, 2)).sum().backward()
        apply = snapshot_step(optimizer)
        pool.end_backward()
        pool.update(update)
    assert sum(updates) == 40
    assert len(updates) <= 2, "one message, but for what a plan wants first"
    pool.close()


def test_eval_and_save_between_steps_see_new_weights():
    run(2, _evaluate_and_save)


def _evaluate_and_save() -> None:
    images, _ = batch(99)
    seen: dict[str, list[torch.Tensor]] = {}

    def evaluate(pool: GradientPool, model: nn.Module, *_: object) -> None:
        model.eval()
        with torch.inference_mode():
            seen.setdefault(name, []).append(model(images))
        model.train()

    def save(pool: GradientPool, model: nn.Module, *_: object) -> None:
        saved = copy.deepcopy(model.state_dict())
        pool.settle()
        assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())

    for settings in DEFERRING:
        name = "deferred"
        deferred = train(settings, SGD, 5, evaluate)
        name = "at once"
        settled = train(settings, SGD, 5, lambda pool, model, *_: (pool.settle(), evaluate(pool, model)))
        assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))
        assert alike(deferred, settled)
        seen.clear()
        train(settings, SGD, 3, save)


class ReadElsewhere(nn.Module):
    """Parameters read by others than their own module: attention's projection, a tied weight, a bare one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0] * self.scale
        return F.linear(x, self.embedding.weight)


def test_parameters_that_another_module_reads_are_up_to_date():
    run(2, _read_by_others)


def _read_by_others() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return ReadElsewhere()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    one, other = (
        trained(HybridSync(wire="fp32"), build, loss, after=after, optimizer_of=partial(build_optimizer, SGD))
        for after in (at_once, nothing)
    )
    assert alike(one, other)


def test_reading_a_parameter_too_early_is_an_error_and_not_a_wrong_result():
    run(1, _read_too_early)


def _read_too_early() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pool = GradientPool(model)
    pool.attach(build_engine(HybridSync(), pool))
    for step in range(2):
        pool.zero_grad()
        if step == 0:
            model(torch.ones(1, 4)).sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r"1\.bias was read before its update.*settle"):
                F.linear(torch.ones(1, 4), model[1].weight, model[1].bias).sum().backward()
            return
        pool.end_backward()
        pool.update(lambda params: None)
