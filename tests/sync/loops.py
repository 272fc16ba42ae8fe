"""A small model and its training loop, which tests bend in one place each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.step_simulator import CodecCost, LinkModel
from imagenet_fast.parallel.ddp import GradientSync, attach
from imagenet_fast.sync import DdpSync, Declaration, EngineSettings, GradientPool
from imagenet_fast.training import optimizers
from tests.sync.fuzz_models import Fails
from tests.sync.given import pooled


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


def images(step: int) -> Tensor:
    """A batch [6, 8] of this rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return model(images(step)).square().sum()


def begin(model: Any, pool: GradientPool, step: int, loss: Callable[[Any, int], Tensor] = loss_of) -> None:
    """All of a step but its end."""
    pool.zero_grad()
    loss(model, step).backward()


def train(model: nn.Module, pool: GradientPool, optimizer: Any, steps: range = range(3)) -> None:
    for step in steps:
        begin(model, pool, step)
        pool.step(optimizer)


def started(settings: EngineSettings, kind: Callable[[nn.Module], Any] | None = None) -> tuple[Layers, Any, Any]:
    """A model, its pool and its optimizer."""
    model = Layers()
    return model, pooled(model, settings), (kind or sgd)(model)


def trained(
    settings: EngineSettings, steps: int = 3, kind: Callable[[nn.Module], Any] | None = None
) -> tuple[Layers, Any, Any]:
    """As many steps later."""
    model, pool, optimizer = started(settings, kind)
    train(model, pool, optimizer, range(steps))
    return model, pool, optimizer


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


def synced(model: nn.Module, settings: EngineSettings | Declaration | DdpSync) -> tuple[nn.Module, GradientSync]:
    """What to call instead of the model, and what averages its gradients."""
    return attach(model, settings) if isinstance(settings, DdpSync) else (model, pooled(model, settings))


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of its weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """To the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
