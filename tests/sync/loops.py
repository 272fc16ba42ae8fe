"""A small model and its training loop, which tests bend in one place each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import CodecCost, LinkModel
from imagenet_fast.sync import DdpSync, DearSync, EngineSettings, GradientPool, HybridSync, LazySync, attach
from imagenet_fast.training import optimizers
from tests.sync.given import pooled

# Every tensor travels by itself, so that there is something to lose between two of them.
HYBRID, DEAR = HybridSync(wire="fp32", fuse_mb=0), DearSync(wire="fp32", bucket_mb=0)
LAZY = LazySync(wire="fp32", threshold_mb=0)
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


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return model(images(step)).square().sum()


def begin(model: Callable[[Tensor], Tensor], pool: GradientPool, step: int) -> None:
    """All of a step but its end."""
    pool.zero_grad()
    loss_of(model, step).backward()


def backward(model: Layers, pool: GradientPool, step: int, fails: int | None) -> bool:
    """Of a step, in which layer ``fails`` does; whether it has come to its end, the exception being caught."""
    model.fails = fails
    try:
        begin(model, pool, step)
    except MemoryError:
        return False
    return True


def train(model: nn.Module, pool: GradientPool, optimizer: Any, steps: range = range(3)) -> None:
    for step in steps:
        begin(model, pool, step)
        pool.step(optimizer)


def started(settings: EngineSettings, kind: Callable[[nn.Module], Any] | None = None) -> tuple[Layers, Any, Any]:
    """A model, its pool and its optimizer."""
    model = Layers()
    return model, pooled(model, settings), (kind or sgd)(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


def ours(model: nn.Module, **changes: Any) -> optimizers.SGD:
    """What ``sparse`` can do with."""
    return optimizers.SGD(model.parameters(), **{"lr": 0.1} | changes)


LINK = LinkModel(1e-4, 1e-8)


@contextmanager
def unmeasured(link: LinkModel = LINK) -> Iterator[None]:
    """Where it is no matter what the network is like, and what codes cost: measuring takes longer than a case."""
    with (
        patch("imagenet_fast.sync.network_benchmark.measure_link", lambda *_: link),
        patch("imagenet_fast.sync.network_benchmark.measure_codec", lambda *_: CodecCost(1e-9, 1e-9)),
    ):
        yield


def end_step(pool: GradientPool | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By the pool, or by hand: with mean gradients, None where no rank has one."""
    if pool is not None:
        pool.step(optimizer)
        return
    for param in model.parameters():
        users = torch.tensor(float(param.grad is not None))
        dist.all_reduce(users)
        if users:
            mean = torch.zeros_like(param, dtype=torch.float64) if param.grad is None else param.grad.double()
            dist.all_reduce(mean)
            param.grad = (mean / dist.get_world_size()).to(param.dtype)
    optimizer.step()


def trained(
    settings: EngineSettings | DdpSync | None, build: Callable[[], Model], loss: Callable[[Any, int], Tensor],
    optimizer_of: Callable[[Model], torch.optim.Optimizer], steps: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Weights and buffers after some steps under an engine, under DDP, or (None) averaged by hand."""
    model = build()
    forward, pool = model, None
    if isinstance(settings, DdpSync):
        forward, _ = attach(model, settings)
    elif settings is not None:
        pool = pooled(model, settings)
    optimizer = optimizer_of(model)
    for step in range(steps):
        (pool or optimizer).zero_grad()
        loss(forward, step).backward()
        if isinstance(settings, DdpSync):
            optimizer.step()
        else:
            end_step(pool, model, optimizer)
    if pool is not None:
        pool.close()
    return state(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of its weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """To the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
