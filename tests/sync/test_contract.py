"""What every engine owes the training loop, on 1 to 8 ranks and awkward sizes."""

from __future__ import annotations

import hashlib
import math
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync import (
    AllReduceSync,
    DdpSync,
    DearSync,
    GradientPool,
    GradientSync,
    HybridSync,
    LazySync,
    RingSync,
    SparseSync,
    attach,
    build_engine,
)
from tests.spawning import run

Settings = AllReduceSync | DdpSync | RingSync | LazySync | HybridSync | DearSync | SparseSync

WIRES = ("fp32", "bf16", "fp16")
ENGINES: list[Settings] = [
    *(DdpSync(wire=wire) for wire in WIRES),
    *(AllReduceSync(wire=wire) for wire in WIRES),
    *(LazySync(wire="bf16", collective=collective) for collective in get_args(Collective)),
    *(LazySync(wire=wire, threshold_mb=mb) for wire in WIRES for mb in (0.0, 0.0005, math.inf)),
    *(RingSync(wire=wire, bucket_mb=0.0005) for wire in WIRES),
    *(HybridSync(wire=wire, fuse_mb=mb) for wire, mb in zip(WIRES, (0.0, 0.0005, math.inf), strict=True)),
    *(DearSync(wire=wire, bucket_mb=mb) for wire, mb in zip(WIRES, (0.0, 0.0005, math.inf), strict=True)),
    *(SparseSync(wire=wire, sparsity=0.0, chunk=64) for wire in WIRES),
]
SIZES = [(1,), (3, 5), (17,), (128, 3), (2, 3, 3, 3), (1,)]
TOLERANCE = {"fp32": 1e-6, "bf16": 1.5e-2, "fp16": 2e-3}


class Sizes(nn.Module):
    """Parameters of given shapes whose gradient is, whatever their value, what ``forward`` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in SIZES)
        self.weights[4].data = self.weights[4].data.to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def gradients_of(rank: int, step: int, integers: bool) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank)
    if integers:  # their means over any ranks are integers that 16 bits hold
        return [dist.get_world_size() * torch.randint(-8, 8, size, generator=generator).float() for size in SIZES]
    return [torch.randn(size, generator=generator) for size in SIZES]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_after_its_update_every_parameter_has_moved_by_the_mean(world: int):
    by_rank = run(world, _every_engine)
    assert all(results == by_rank[0] for results in by_rank), "ranks differ in a bit"


def _every_engine() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    fingerprints = []
    for settings in ENGINES:
        model = Sizes()
        forward, sync = attach(model, settings)
        applied: dict[nn.Parameter, torch.Tensor] = {}

        def keep(params: list[nn.Parameter], applied: dict[nn.Parameter, torch.Tensor] = applied) -> None:
            for param in params:
                assert param not in applied, "updated twice"
                assert param.grad is not None
                applied[param] = param.grad.clone()

        for step in range(2):
            for integers in (True, False):
                applied.clear()
                sync.zero_grad()
                forward(gradients_of(rank, step, integers)).backward()
                stats = sync.finish()
                sync.update(keep)
                sync.settle()
                everyone = [gradients_of(r, step, integers) for r in range(world)]
                for param, *parts in zip(model.weights, *everyone, strict=True):
                    mean = torch.stack(parts).double().mean(0)
                    tolerance = 0.0 if integers else TOLERANCE[settings.wire]
                    torch.testing.assert_close(
                        applied[param].double(), mean, rtol=tolerance, atol=tolerance, msg=f"{settings}, step {step}"
                    )
                    fingerprints.append(hashlib.sha256(applied[param].cpu().numpy().tobytes()).hexdigest())
        assert model.frozen.grad is None
        if world == 1:
            assert stats.sent_bytes == stats.received_bytes == 0
        else:
            assert stats.sent_bytes > 0
            assert stats.launches > 0
        if not isinstance(settings, DdpSync):
            assert stats.exposed is not None
            assert stats.exposed.seconds() >= 0
    return fingerprints


def test_accumulation_unused_and_shared_parameters():
    run(2, _awkward_models)


def _awkward_models() -> None:
    rank = dist.get_rank()
    for settings in (
        AllReduceSync(),
        LazySync(wire="fp32", threshold_mb=0),
        LazySync(wire="fp32", threshold_mb=1),
        RingSync(wire="fp32"),
        HybridSync(wire="fp32"),
        DearSync(wire="fp32"),
        SparseSync(wire="fp32", sparsity=0.0, chunk=4),
    ):
        _accumulates(settings, rank)
        _survives_an_unused_layer(settings, rank)
        _adds_up_a_shared_weight(settings, rank)
    _accumulates(DdpSync(), rank)


def _accumulates(settings: Settings, rank: int) -> None:
    model = Sizes()
    forward, sync = attach(model, settings)
    for _ in range(2):  # the second step must not see the first
        sync.zero_grad()
        for micro_step in range(2):
            with sync.no_sync():
                forward(gradients_of(rank, micro_step, True)).backward()
        forward(gradients_of(rank, 2, True)).backward()
        grads = _applied(sync)
        for i, param in enumerate(model.weights):
            mean = sum(gradients_of(r, s, True)[i] for r in range(2) for s in range(3)) / 2
            assert torch.equal(grads[param], mean), settings


def _survives_an_unused_layer(settings: Settings, rank: int) -> None:
    """A different layer is idle on each rank, and in each step."""
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
    _, sync = attach(model, settings)
    for step in range(3):
        sync.zero_grad()
        used = [layer for i, layer in enumerate(model) if i != (rank + step) % 3]
        sum(layer(torch.ones(1, 3)).sum() for layer in used).backward()
        grads = _applied(sync)
        for i, layer in enumerate(model):
            users = sum(i != (r + step) % 3 for r in range(2))
            assert torch.equal(grads[layer.weight], torch.full((3, 3), users / 2)), (settings, step)


def _adds_up_a_shared_weight(settings: Settings, rank: int) -> None:
    layer = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(layer, layer)
    nn.init.eye_(layer.weight)
    _, sync = attach(model, settings)
    sync.zero_grad()
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    assert torch.equal(_applied(sync)[layer.weight], torch.full((3, 3), 3.0)), (
        settings
    )  # 2 uses, of 1 and of 2, averaged


def _applied(sync: GradientSync) -> dict[nn.Parameter, torch.Tensor]:
    """End the step; the gradients that parameters were updated with."""
    grads: dict[nn.Parameter, torch.Tensor] = {}
    sync.finish()
    sync.update(lambda params: grads.update((p, p.grad.clone()) for p in params))
    sync.settle()
    return grads


def test_lazy_fuses_until_its_threshold():
    run(2, _counts_launches)


def _counts_launches() -> None:
    for threshold, wire in ((0.0, "fp32"), (0.0005, "fp32"), (0.0005, "bf16"), (math.inf, "fp32")):
        model = Sizes()
        pool = GradientPool(model)
        pool.attach(build_engine(LazySync(wire=wire, threshold_mb=threshold), pool))
        pool.zero_grad()
        model(gradients_of(0, 0, True)).backward()
        stats = pool.finish()
        message = pool.buffer.numel() * (4 if wire == "fp32" else 2)
        assert stats.sent_bytes == message, "two ranks send 2 (2-1)/2 of the pool each"
        match threshold:
            case 0.0:
                assert stats.launches == len(SIZES)
            case math.inf:
                assert stats.launches == 1
            case _:
                assert 1 < stats.launches <= math.ceil(message / (threshold * 2**20)) + 1
