"""Small training loops, which tests bend in one place each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import CodecCost, LinkModel
from imagenet_fast.sync import (
    AllReduceSync,
    DearSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    SparseSync,
    build_engine,
)
from imagenet_fast.sync.topology import Topology

# Every tensor travels by itself, so that there is something to lose between two of them.
HYBRID, DEAR = HybridSync(wire="fp32", fuse_mb=0), DearSync(wire="fp32", bucket_mb=0)
LAZY = LazySync(wire="fp32", threshold_mb=0)
DENSE = SparseSync(wire="fp32", sparsity=0.0, chunk=16, ramp_epochs=0)
"""Sparse while it sends everything."""
DEFERRING: tuple[EngineSettings, ...] = (HYBRID, DEAR)
EXACT: tuple[EngineSettings, ...] = (*DEFERRING, LAZY, DENSE, AllReduceSync(wire="fp32"))

Bend = Callable[[GradientPool, nn.Module, torch.optim.Optimizer], object]


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


@cache
def lending(ranks_per_node: int | None = None) -> Topology:
    """All ranks, with channels that pools use one after the other: connecting takes longer than most of what tests do
    with them. Every rank must make the first call alike."""
    return Topology(torch.get_default_device(), ranks_per_node=ranks_per_node, lends=True)


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


def trained(
    settings: EngineSettings,
    build: Callable[[], nn.Module] = Layers,
    loss: Callable[[Any, int], Tensor] = loss_of,
    before: Bend = nothing,
    after: Bend = nothing,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    steps: int = 6,
) -> dict[str, Tensor]:
    """Weights and buffers after some steps; ``before`` each of them something happens, and ``after``."""
    model = build()
    pool, optimizer = pooled(model, settings), optimizer_of(model)
    for number in range(steps):
        before(pool, model, optimizer)
        pool.zero_grad()
        loss(model, number).backward()
        pool.step(optimizer)
        after(pool, model, optimizer)
    pool.settle()
    return state(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of its weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """To the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def take_steps_together(
    pools: Sequence[GradientPool], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    """Of a model whose parameters lie in several pools."""
    for step in range(steps):
        for pool in pools:
            pool.zero_grad()
        loss_of(model, step).backward()
        for pool in pools:
            pool.step(optimizer)
