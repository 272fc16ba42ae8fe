"""Layers whose gradients are what they are given, pools, and what a step of a pool updates parameters with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.parallel.ddp import GradientSync
from imagenet_fast.sync import Declaration, EngineSettings, GradientPool, SyncStats
from imagenet_fast.sync.topology import Topology
from tests.ranks import at_end, lending

Shapes = Sequence[tuple[int, ...]]
Gradients = Sequence[Tensor | None]
SMALL: Shapes = [(64,), (16, 4), (64,), (4, 16), (64,)]


class Layer(nn.Module):
    """Its parameters' gradients are, whatever their values, what ``forward`` is given; None where one is not used."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            self.register_parameter(f"param{number}", nn.Parameter(torch.zeros(shape).to(memory_format=memory)))

    def forward(self, gradients: Gradients) -> Tensor:
        used = [(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True) if g is not None]
        return torch.stack(used).sum()


class Given(nn.Module):
    """Layers, called in another order than they are registered in, and a parameter that is frozen."""

    def __init__(self, *layers: Shapes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, layers))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, gradients: Gradients) -> Tensor:
        given = iter(gradients)
        parts = [(layer, [next(given) for _ in layer.parameters()]) for layer in self.layers]
        return torch.stack([layer(part) for layer, part in reversed(parts) if part != [None] * len(part)]).sum()

    @property
    def weights(self) -> list[nn.Parameter]:
        """All but the frozen one, as gradients are given."""
        return list(self.layers.parameters())


def normals(shapes: Shapes, step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradients of a step and a rank."""
    generator = _generator(step, rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def integers(shapes: Shapes, step: int, rank: int, ranks: int) -> list[Tensor]:
    """Gradients whose means over as many ``ranks``, or a part of them, are integers that 16 bits hold."""
    generator = _generator(step, rank)
    return [ranks * torch.randint(-8, 8, shape, generator=generator).float() for shape in shapes]


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank)


def means(by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Over the ranks, in float64."""
    return [torch.stack(parts).double().mean(0) for parts in zip(*by_rank, strict=True)]


def mean_over_ranks(values: Tensor) -> Tensor:
    """What all ranks have of it, averaged."""
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def same_on_ranks(*values: Tensor) -> None:
    """Check that all ranks have the same bits, and no infinities."""
    for own in values:
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(own, first)
        assert own.isfinite().all()


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all its parameters, one after the other."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def pooled(
    model: nn.Module, settings: EngineSettings | Declaration, *, topology: Topology | None = None,
    group: dist.ProcessGroup | None = None, steps_per_epoch: int = 1,
) -> GradientPool:  # fmt: skip
    """A pool of all parameters, with its engine, on streams that other cases use too where it is one of all ranks.

    It is closed at the end of the case.
    """
    if topology is None and group is None and dist.is_initialized() and torch.get_default_device().type == "cpu":
        topology = lending()
    pool = GradientPool(model, settings, group, topology=topology, steps_per_epoch=steps_per_epoch)
    if dist.is_initialized():
        at_end.append(pool.close)
    return pool


@contextmanager
def process_groups(*ranks: Sequence[int], **options: Any) -> Iterator[list[dist.ProcessGroup]]:
    """Groups of torch for these ranks, as users make them; every rank must make all of them."""
    groups = [dist.new_group(list(of_one), **options) for of_one in ranks]
    yield groups
    dist.barrier()  # nobody closes a connection that another still reads from
    for group in groups:
        dist.destroy_process_group(group)


def applied(
    sync: GradientSync, forward: Callable[..., Tensor], *given: Gradients
) -> tuple[dict[nn.Parameter, Tensor], SyncStats]:
    """What a step updates parameters with; given the gradients of several micro-steps, their sums."""
    applied: dict[nn.Parameter, Tensor] = {}

    def keep(params: list[nn.Parameter]) -> None:
        for param in params:
            assert param not in applied, "updated twice"
            assert param.grad is not None
            assert param.grad.stride() == param.stride()
            applied[param] = param.grad.clone()

    sync.zero_grad()
    for gradients in given[:-1]:
        with sync.no_sync():
            forward(gradients).backward()
    forward(given[-1]).backward()
    stats = sync.end_backward()
    sync.update(keep)
    sync.settle()
    return applied, stats
