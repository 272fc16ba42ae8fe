"""Small training loops, which tests bend in one place each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import CodecCost, LinkModel
from imagenet_fast.sync import (
    DdpSync,
    DearSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    SparseSync,
    attach,
    build_engine,
)
from imagenet_fast.training import optimizers
from tests.ranks import lending

# Every tensor travels by itself, so that there is something to lose between two of them.
HYBRID, DEAR = HybridSync(wire="fp32", fuse_mb=0), DearSync(wire="fp32", bucket_mb=0)
LAZY = LazySync(wire="fp32", threshold_mb=0)
DENSE = SparseSync(wire="fp32", sparsity=0.0, chunk=16, ramp_epochs=0)
"""Sparse while it sends everything."""
DEFERRING: tuple[EngineSettings, ...] = (HYBRID, DEAR)

Bend = Callable[[Any, Any, Any, int], object]
"""What happens around a step: it is given the pool, the model, the optimizer and the step's number."""
Model = TypeVar("Model", bound=nn.Module)


class Layers(nn.Module):
    """Fully connected layers, read in the order of their numbers, registered in another."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in order]
        for number in order:
            self.add_module(f"layer{number}", layers[number])
        self.fails: int | None = None
        """The layer whose backward, and that of all below it, is not reached for an exception."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(5):
            x = self.get_submodule(f"layer{number}")(x).tanh()
            if self.fails == number:
                x = Fails.apply(x)
        return x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("as if there were no memory left")


def images(step: int) -> Tensor:
    """A batch [6, 8] of this rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: Layers, pool: GradientPool, step: int, fails: int | None) -> bool:
    """Of a step, in which layer ``fails`` does; whether it has come to its end, the exception being caught."""
    model.fails = fails
    pool.zero_grad()
    try:
        loss_of(model, step).backward()
    except MemoryError:
        return False
    return True


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(images(step)).square().sum()
    return loss


LINK = LinkModel(1e-4, 1e-8)


@contextmanager
def unmeasured(link: LinkModel = LINK) -> Iterator[None]:
    """Where it is no matter what the network is like, and what codes cost: measuring takes longer than a case."""
    with (
        patch("imagenet_fast.sync.network_benchmark.measure_link", lambda *_: link),
        patch("imagenet_fast.sync.network_benchmark.measure_codec", lambda *_: CodecCost(1e-9, 1e-9)),
    ):
        yield


def pooled(model: nn.Module, settings: EngineSettings) -> GradientPool:
    pool = GradientPool(model)
    pool.attach(build_engine(settings, pool))
    return pool


def sgd(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05, fused=fused)


def take_step(pool: GradientPool, optimizer: torch.optim.Optimizer, settings: EngineSettings) -> None:
    """``pool.step``, also for ``sparse`` while nothing stays behind."""
    if settings.keeps:
        pool.end_backward()
        pool.update(lambda params, elements=None: optimizer.step())
    else:
        pool.step(optimizer)


def at_once(pool: GradientPool, *_: object) -> None:
    """After a step: an update that was put off."""
    pool.settle()


def nothing(*_: object) -> None:
    """Happens where a test bends something else."""


def average_by_hand(model: nn.Module) -> None:
    """Mean gradients, None where no rank has one."""
    for param in model.parameters():
        users = torch.tensor(float(param.grad is not None))
        dist.all_reduce(users)
        if users:
            mean = torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
            dist.all_reduce(mean)
            param.grad = (mean / dist.get_world_size()).to(param.dtype)


def end_step(pool: GradientPool | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By the pool, or by hand."""
    if pool is None:
        average_by_hand(model)
        optimizer.step()
    elif pool.reducer.engine.sends_part and not isinstance(optimizer, optimizers.SGD):  # while it sends everything
        pool.end_backward()
        pool.update(lambda params, elements=None: optimizer.step())
    else:
        pool.step(optimizer)


def trained(
    settings: EngineSettings | DdpSync | None,
    build: Callable[[], Model] = Layers,
    loss: Callable[[Any, int], Tensor] = loss_of,
    before: Bend = nothing,
    after: Bend = nothing,
    optimizer_of: Callable[[Model], torch.optim.Optimizer] = sgd,
    steps: int = 6,
    backward: Callable[[Model, GradientPool | None, int], object] | None = None,
    end: Callable[[GradientPool | None, Model, Any], object] = end_step,
) -> dict[str, Tensor]:
    """Weights and buffers after some steps under an engine, under DDP, or (None) averaged by hand.

    Args:
        settings: The engine.
        build: Makes the model, the same on all ranks.
        loss: Of a model and a step, by its number.
        before: Happens before each step, with the step's number; ``after``, behind it.
        after: See ``before``.
        optimizer_of: Makes the optimizer of a model.
        steps: How many.
        backward: Makes the gradients of a step, in place of ``loss``.
        end: Ends a step.
    """
    model = build()
    forward, pool = model, None
    if isinstance(settings, DdpSync):
        forward, _ = attach(model, settings)
        end = take_own_step
    elif settings is not None:
        pool = GradientPool(model, topology=lending() if dist.is_initialized() else None)
        pool.attach(build_engine(settings, pool))
    optimizer = optimizer_of(model)
    for step in range(steps):
        before(pool, model, optimizer, step)
        (pool or optimizer).zero_grad()
        if backward is None:
            loss(forward, step).backward()
        else:
            backward(model, pool, step)
        end(pool, model, optimizer)
        after(pool, model, optimizer, step)
    if pool is not None:
        pool.close()
    return state(model)


def take_own_step(pool: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of an optimizer, as DDP's users end theirs."""
    optimizer.step()


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of its weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """To the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
