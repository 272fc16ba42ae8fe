"""Loops of users with a slip, or with a use of the model that is rare: right as under DDP, or refused in words."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imagenet_fast.sync import DearSync, EngineSettings, GradientPool, HybridSync, LazySync, SparseSync, build_engine
from imagenet_fast.training.optimizers import SGD
from tests.ranks import run
from tests.sync.loops import alike, pooled, trained

LAZY, HYBRID, DEAR = LazySync(wire="fp32"), HybridSync(wire="fp32"), DearSync(wire="fp32")
EXACT: dict[str, EngineSettings] = {"lazy": LAZY, "hybrid": HYBRID, "dear": DEAR}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def images(step: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Callable[..., Tensor], step: int) -> Tensor:
    return model(images(step)).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_wrapper_of_ddp_that_was_left_is_refused():
    run(2, _left_in_ddp)


def _left_in_ddp() -> None:
    """Both average: ranks would diverge, and by another amount in each run."""
    with pytest.raises(ValueError, match="DistributedDataParallel averages gradients itself; give the pool"):
        GradientPool(DistributedDataParallel(network()))
    model = network()
    forward = DistributedDataParallel(model)
    pool = pooled(model, LAZY)
    pool.zero_grad()
    with pytest.raises(RuntimeError, match="DistributedDataParallel calls the model of this gradient pool"):
        forward(images(0))
    model(images(0)).sum().backward()
    pool.step(torch.optim.SGD(model.parameters(), 0.1))
    pool.close()


def test_an_engine_of_another_pool_is_refused():
    one, other = GradientPool(network()), GradientPool(network())
    engine = build_engine(LAZY, one)
    with pytest.raises(ValueError, match="this engine was built for another pool"):
        other.attach(engine)
    one.attach(engine)


def _clamp(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("how", ["apply", "parameters"])
def test_weights_may_be_written_between_steps_by_asking_the_model(how: str):
    @torch.no_grad()
    def clamp(pool: GradientPool, model: nn.Module, *_: object) -> None:
        if how == "apply":
            model.apply(_clamp)
        else:
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)

    expected = trained(LAZY, network, loss_of, after=clamp)
    for settings in (HYBRID, DEAR):
        torch.testing.assert_close(trained(settings, network, loss_of, after=clamp), expected)


@pytest.mark.parametrize("how", ["param_groups", "modules", "children"])
def test_weights_are_not_written_before_their_update(how: str):
    model = network()
    pool, optimizer = pooled(model, HYBRID), torch.optim.SGD(model.parameters(), 0.1)

    def take_a_step(step: int) -> None:
        pool.zero_grad()
        loss_of(model, step).backward()
        pool.step(optimizer)

    for step in range(3):
        take_a_step(step)
    with torch.no_grad():
        if how == "param_groups":
            for param in optimizer.param_groups[0]["params"]:
                param.clamp_(-0.2, 0.2)
        else:
            for module in getattr(model, how)():
                _clamp(module)
    with pytest.raises(RuntimeError, match=r"was written to while its update was pending; call pool.settle\(\) before"):
        take_a_step(3)


class Online(nn.Module):
    """Every third forward copies its weights to a target."""

    def __init__(self) -> None:
        super().__init__()
        self.online = network()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            with torch.no_grad():
                for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    target.copy_(online)
        return self.online(values) - self.target(values).sin()


class Tied(nn.Module):
    """Two layers whose weights are one tensor in memory, but two parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.between, self.dec = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dec.weight.data = self.enc.weight.data

    def forward(self, values: Tensor) -> Tensor:
        return self.dec(self.between(self.enc(values)).tanh())


@pytest.mark.parametrize("kind", [Online, Tied])
def test_parameters_that_a_forward_reads_by_itself_are_up_to_date(kind: Callable[[], nn.Module]):
    def without_decay(model: nn.Module) -> torch.optim.Optimizer:  # by which the order of two tied updates would count
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)

    expected = trained(LAZY, kind, loss_of, optimizer_of=without_decay, steps=8)
    for settings in (HYBRID, HybridSync(wire="fp32", fuse_mb=0), DEAR):
        found = trained(settings, kind, loss_of, optimizer_of=without_decay, steps=8)
        torch.testing.assert_close(found, expected)


def test_an_optimizer_outlives_its_pools_without_them():
    model = network()
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        pool = pooled(model, DEAR)
        seen.append(weakref.ref(pool))
        for step in range(2):
            pool.zero_grad()
            loss_of(model, step).backward()
            pool.step(optimizer)
        pool.close()
        del pool
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3
    assert optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
def test_torch_func_may_call_the_model(settings: EngineSettings):
    def loss(model: nn.Module, step: int) -> Tensor:
        values, tangents = torch.func.jvp(model, (images(step),), (torch.ones(4, 8),))
        return values.square().mean() + tangents.square().mean()

    torch.testing.assert_close(trained(settings, network, loss, steps=3), trained(LAZY, network, loss, steps=3))


class Wrapper(torch.optim.Optimizer):
    """Of the shape of Accelerate's: an optimizer without the attributes that ``Optimizer.__init__`` makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
def test_an_optimizer_may_be_wrapped(settings: EngineSettings):
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.01)

    wrapped = trained(settings, network, loss_of, optimizer_of=lambda model: Wrapper(adamw(model)))
    assert alike(wrapped, trained(settings, network, loss_of, optimizer_of=adamw))


def test_an_optimizer_that_steps_in_backward_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step_now(param: nn.Parameter) -> None:
        param.grad = None

    hook = model[2].weight.register_post_accumulate_grad_hook(step_now)
    pool = pooled(model, LAZY)
    pool.zero_grad()
    with pytest.raises(RuntimeError, match=r"a hook took the gradient of 2\.weight away before it was averaged"):
        loss_of(model, 0).backward()
    hook.remove()
    pool.zero_grad()
    loss_of(model, 0).backward()
    pool.step(optimizer)
    pool.close()


@pytest.mark.parametrize("wire", ["int8", "fp8", "sparse"])
def test_the_default_dtype_does_not_matter(wire: str):
    run(2, _in_float64, wire)


def _in_float64(wire: Any) -> None:
    few = SparseSync(wire="fp32", sparsity=0.5, chunk=16, dense_epochs=0, ramp_epochs=0)
    model = network()
    torch.set_default_dtype(torch.float64)
    try:
        pool, optimizer = (
            pooled(model, few if wire == "sparse" else LazySync(wire=wire)),
            SGD(model.parameters(), lr=0.1),
        )
        for step in range(4):
            pool.zero_grad()
            model(images(step).float()).square().mean().backward()
            pool.step(optimizer)
        pool.settle()
        pool.close()
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights(model).isfinite().all()
