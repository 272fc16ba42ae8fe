"""Whoever reads a model between steps finds weights that are up to date, under engines that defer updates as well."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from imagenet_fast.sync import EngineSettings, GradientPool
from tests.sync.loops import DEFERRING, LAZY, Layers, alike, images, loss_of, pooled, sgd, state, trained

Read = Callable[[nn.Module, torch.optim.Optimizer], object]


class ReadsAndMerges(Layers):
    """A block reads its children's weights by itself, the head is tied to the first layer, and an adapter is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layer0.weight
        self.adapter = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.adapter(self.reader(super().forward(x))))
        return out


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            out: Tensor = self.inner(x)
            return out
        return x @ self.inner.weight.T + self.inner.bias


class Adapter(nn.Module):
    """As LoRA: ``eval`` adds the product to the weight, ``train`` takes it off again."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.Parameter(torch.randn(2, 8) / 4), nn.Parameter(torch.randn(8, 2) / 4)
        self.merged = False

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if mode == self.merged:
            product = (self.up @ self.down).detach()
            self.base.weight.data += -product if mode else product
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


def evaluated(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        out: Tensor = model(images(99))
    model.train()
    return out


def head_alone(model: nn.Module) -> Tensor:
    out: Tensor = model.get_submodule("head")(images(99))
    return out.detach()


def child_in_eval(model: nn.Module) -> Tensor:
    child = model.get_submodule("reader").eval()
    with torch.no_grad():
        out: Tensor = child(images(99))
    child.train()
    return out


READS: dict[str, Read] = {
    "evaluation": lambda model, _: evaluated(model),
    "a tied head alone": lambda model, _: head_alone(model),
    "a child in eval": lambda model, _: child_in_eval(model),
    "parameters": lambda model, _: torch.cat([p.detach().flatten() for p in model.parameters()]),
    "a child's named_parameters": lambda model, _: dict(model.get_submodule("adapter").named_parameters())[
        "up"
    ].clone(),
    "functional_call": lambda model, _: functional_call(model, dict(model.named_parameters()), images(99)).detach(),
    "AveragedModel": lambda model, _: _averaged(model),
    "deepcopy of the optimizer": lambda _, optimizer: copy.deepcopy(optimizer).param_groups[0]["params"][0].detach(),
    "pickle of the optimizer": lambda _, o: pickle.loads(pickle.dumps(o)).param_groups[0]["params"][0].detach(),
    "to": lambda model, _: model.double().layer2.weight.float().detach(),
}


def _averaged(model: nn.Module) -> Tensor:
    average = AveragedModel(model)
    average.update_parameters(model)
    out: Tensor = average(images(99))
    return out.detach()


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
@pytest.mark.parametrize("name", READS)
def test_a_read_between_steps_finds_the_last_update(name: str, settings: EngineSettings):
    def seen(settings: EngineSettings) -> tuple[list[object], dict[str, Tensor]]:
        torch.manual_seed(3)
        model = ReadsAndMerges()
        pool, optimizer = pooled(model, settings), sgd(model)
        reads: list[object] = []
        for step in range(5):
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.step(optimizer)
            if step > 1:
                reads.append(READS[name](model, optimizer))
                model.float()
        pool.close()
        return reads, state(model)

    (reads, weights), (expected, expected_weights) = seen(settings), seen(LAZY)
    assert all(torch.equal(a, b) for a, b in zip(reads, expected, strict=True))
    assert alike(weights, expected_weights)


@pytest.mark.parametrize("settings", DEFERRING, ids=["hybrid", "dear"])
def test_parameters_inside_forward_keep_updates_deferred(settings: EngineSettings):
    """Models ask ``next(self.parameters()).dtype``; layers are brought up to date one by one all the same."""

    class Asking(Layers):
        def forward(self, x: Tensor) -> Tensor:
            pending.append(len(pool.reducer.deferral._pending) if pool.reducer.deferral else 0)
            return super().forward(x.to(next(self.parameters()).dtype))

    pending: list[int] = []
    model = Asking()
    pool, optimizer = pooled(model, settings), sgd(model)
    settled: list[int] = []
    model.layer4.register_forward_pre_hook(lambda *_: settled.append(len(pool.reducer.deferral._pending)))  # type: ignore[union-attr]
    for step in range(8):  # five are watched, in which nothing is put off
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)
    assert pending[-1] >= 9, "all but that of the parameter that forward asks for its dtype"
    assert settled[-1] == 0, "our hooks go before a module's others"
    middle: list[int] = []
    model.layer2.register_forward_pre_hook(lambda *_: middle.append(len(pool.reducer.deferral._pending)))  # type: ignore[union-attr]
    pool.zero_grad()
    loss_of(model, 8)
    assert 0 < middle[-1] < 10
    pool.close()


def test_methods_that_a_user_had_set_are_called_and_put_back():
    model = Layers()
    calls: list[str] = []

    def disabled_train(mode: bool = True) -> nn.Module:
        calls.append("train")
        return model.layer0

    model.layer0.train = disabled_train  # type: ignore[method-assign]
    pool = pooled(model, DEFERRING[0])
    model.train()
    assert calls == ["train"]
    pool.close()
    assert model.layer0.train is disabled_train
    assert "train" not in vars(model)
    assert "parameters" not in vars(model)


@pytest.mark.parametrize("settings", [*DEFERRING, LAZY], ids=["hybrid", "dear", "lazy"])
def test_channels_last_after_the_pool_trains_as_by_hand(settings: EngineSettings):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 3))

    def loss(model: nn.Module, step: int) -> Tensor:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        squares: Tensor = model(images).square().sum()
        return squares

    def convert(pool: object, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 2:  # state in the old layout is torch's affair: by hand fused AdamW mixes it up as well.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer.state.clear()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def alone(pool: GradientPool | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (pool.step(optimizer) if pool is not None else optimizer.step())

    expected, found = (
        trained(chosen, build, loss, convert, optimizer_of=adamw, steps=5, end=alone) for chosen in (None, settings)
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_converted_after_the_pool_is_refused_in_words():
    model = Layers()
    pool = pooled(model, LAZY)
    model.double()
    with pytest.raises(RuntimeError, match=r"layer4\.bias is now torch\.float64 .* was made for torch\.float32"):
        pool.zero_grad()
    pool.close()
