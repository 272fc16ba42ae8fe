"""Norms by kernels equal torch's in float64, and networks with them follow those without, under every engine.

Without a GPU Triton interprets kernels, in processes of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torchvision.models
from torch import Tensor, nn

from imagenet_fast.models import build_model, fuse_norms
from imagenet_fast.models.fused_norm import FusedBatchNorm2d, unusable
from imagenet_fast.models.resnet import BasicBlock, Bottleneck, ResNet
from imagenet_fast.netlab.forks import ForkedRanks
from imagenet_fast.recipe.job import differences, recipe_tables
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import Recipe
from tests.conftest import refuses, tables, tiers
from tests.models.test_models import NETWORKS
from tests.parallel import small
from tests.parallel.test_following import ENGINES, LAYOUTS
from tests.ranks import run
from tests.sync.loops import unmeasured

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter cuts bf16 where a GPU rounds it.
EPS = {torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7, torch.float16: 2**-11, torch.float32: 2**-18}
BF16, FP16, FP32 = EPS
SHAPES = [
    (2, 64, 5, 7), (3, 128, 4, 4), (2, 256, 3, 5), (1, 512, 7, 3), (2, 2048, 2, 2), (2, 3, 9, 9), (5, 24, 3, 3),
    (1, 65, 2, 5), (4, 100, 1, 1), (1, 1, 2, 1),
]  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "alone": {}, "relu": {"relu": "after"}, "add": {"relu": "after"}, "fork": {"relu": "after"},
    "far from 0": {"relu": "after"}, "relu first": {"relu": "before", "affine": False},
}  # fmt: skip


def interpret() -> None:
    """Have Triton interpret kernels in this process. It decides that when it is imported, as it may be already."""
    for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def _begin(_: int) -> Iterator[None]:
    if DEVICE.type == "cpu":
        interpret()
    yield


@pytest.fixture(scope="module")
def kernels() -> Iterator[ForkedRanks]:
    """A process in which kernels run."""
    pool = ForkedRanks(1, _begin, preload="tests.forked")
    yield pool
    pool.close()


def images(shape: tuple[int, ...], dtype: torch.dtype, seed: int, mean: float = 0.5) -> Tensor:
    """Each channel has a mean and a deviation of its own."""
    drawn = torch.Generator().manual_seed(seed)
    spread, middle = (torch.rand(1, shape[1], 1, 1, generator=drawn) for _ in range(2))
    values = (0.5 + spread) * torch.randn(shape, generator=drawn) + mean * (middle - 0.3)
    return values.to(DEVICE, dtype, memory_format=torch.channels_last)


def norm_of(channels: int, **options: Any) -> FusedBatchNorm2d:
    norm, drawn = FusedBatchNorm2d(channels, **options), torch.Generator().manual_seed(0)
    for values in (*norm.parameters(), norm.running_mean, norm.running_var):
        values.data.copy_(torch.rand(channels, generator=drawn) + 0.25)
    norm.fused = True
    return norm.to(DEVICE)


def agree(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    """Output, gradients and statistics are those in float64."""
    mean = 1000.0 if kind == "far from 0" else 0.5
    ours, torchs = (norm_of(shape[1], **KINDS[kind]) for _ in range(2))
    ours.forks, adds = kind == "fork", kind in ("add", "fork")
    x, r, dy, dy2 = (images(shape, dtype, seed, mean if seed == 0 else 0.5).requires_grad_() for seed in range(4))
    out = ours(x, r if adds else None)
    outs, dys = (out, (dy, dy2)) if kind == "fork" else ((out,), (dy,))
    found = [outs[0].detach(), *torch.autograd.grad(outs, [x, *([r] if adds else []), *ours.parameters()], dys)]
    assert (outs[0].dtype, outs[0].stride()) == (dtype, x.stride())
    exact = torchs.double()
    exact.fused, exact.relu, passed = False, "none", outs[0] > 0  # where a sum is near 0, rounding decides what passes
    x, r = (values.detach().double().requires_grad_() for values in (x, r))
    want = exact(x.relu() if ours.relu == "before" else x, r.clone() if adds else None)
    want = torch.where(passed, want, 0.0) if ours.relu == "after" else want
    total = sum(values.detach().double() for values in dys)
    expected = [want.detach(), *torch.autograd.grad(want, [x, *([r] if adds else []), *exact.parameters()], total)]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        sums = number > 1 + adds  # those of weight and bias, of terms that a rounded gradient has changed
        near = max(2**-12, EPS[dtype] / 4) if sums and dtype != FP32 else EPS[dtype]
        size = max(1.0, float(other.abs().max())) + sums * (x.numel() / shape[1]) ** 0.5
        off = float((one.double() - other).abs().max())
        assert off <= 2 * max(1.0, mean) * near * size, f"value {number} is off by {off:.3g} of {size:.3g}"
    for one, other in zip(ours.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5 * max(1.0, mean))


FIRST = [
    ((2, 64, 5, 7), BF16, "fork"), ((2, 3, 9, 9), FP32, "relu"), ((1, 65, 2, 5), FP16, "add"),
    ((5, 24, 3, 3), FP32, "relu first"), ((4, 100, 1, 1), FP32, "alone"),
]  # fmt: skip
EVERY = [(shape, dtype, kind) for shape in SHAPES for dtype in EPS for kind in KINDS if kind != "far from 0"]
EVERY += [((4, 64, 6, 6), FP32, "far from 0"), ((2, 64, 61, 59), BF16, "fork")]


@pytest.mark.parametrize(("shape", "dtype", "kind"), tiers(FIRST, EVERY), ids=str)
def test_outputs_gradients_and_statistics_are_those_of_float64(shape, dtype, kind, kernels: ForkedRanks):
    kernels.run(agree, shape, dtype, kind)


def odd_values_and_inputs() -> None:
    """NaN and infinity stay, results are the same again, and what kernels do not take goes to torch."""
    x = images((2, 64, 4, 4), BF16, 0)
    norm, same, plain = (norm_of(64, relu="after") for _ in range(3))
    assert torch.equal(norm(x, x), same(x, x))
    plain.fused = False
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x.float().contiguous()), plain(x.float().contiguous()))
    assert torch.equal(norm.eval()(x), plain.eval()(x))
    x[0, 5, 1, 1], x[0, 6, 1, 1] = float("nan"), float("inf")
    wrong = ~same(x).isfinite().all(3).all(2).all(0)
    assert wrong.nonzero().flatten().tolist() == [5, 6]
    assert (~same.running_mean.isfinite()).nonzero().flatten().tolist() == [5, 6]
    assert all(unusable(DEVICE, dtype) == "" for dtype in EPS), "the first norm agrees with torch's"


def test_odd_values_and_inputs(kernels: ForkedRanks):
    kernels.run(odd_values_and_inputs)


def test_norms_that_are_not_fused_are_torchs_to_the_bit():
    models = build_model(NETWORKS["resnet18"], 10), torchvision.models.resnet18(num_classes=10)
    models[1].load_state_dict(models[0].state_dict())
    batch = torch.randn(3, 3, 40, 40)
    for model in models:
        model(batch).square().sum().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, models[0].buffers(), models[1].buffers()))


class Narrow(ResNet):
    """A ResNet with an eighth of the channels behind its stem. With 4, torch 2.14's own backward crashes on CPUs."""

    def _layer(self, block: Any, planes: int, blocks: int, stride: int) -> nn.Sequential:
        return super()._layer(block, planes // 8, blocks, stride)


def network(kind: str) -> nn.Module:
    if kind == "alexnet_bn":
        return small.small_model(kind)
    torch.manual_seed(0)
    model = Narrow(BasicBlock if kind == "resnet18" else Bottleneck, (2, 1, 1, 1), small.CLASSES)
    return model.to(memory_format=torch.channels_last)


@unmeasured()
def trained(kind: str, engine: str, layout: str, micro_batch: int, fused: bool) -> dict[str, Tensor]:
    parallel = LAYOUTS[layout][1] if layout else small.UNDIVIDED
    settings = {"global_batch": 8, "micro_batch": micro_batch, "sync": ENGINES[engine]}
    with patch.dict(small.PIXELS, resnet18=40, resnet50=40):
        loop = small.Loop(kind, parallel, model={"kind": kind, "fused_norm": fused}, **settings)
        take_step = loop.begin(network(kind))
        for step in range(3):
            take_step(loop.batches(step), 1e-4)
    take_step.state.settle()
    weights = {name: tensor.clone() for name, tensor in take_step.state.whole().state_dict().items()}
    take_step.state.sync.close()
    return weights


def both(*case: Any) -> list[dict[str, Tensor]]:
    interpret()
    return [trained(*case, fused=fused) for fused in (False, True)]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "engine", "layout", "micro_batch"),
    [
        *((kind, engine, "", 4) for kind in ("resnet18", "resnet50", "alexnet_bn") for engine in ENGINES),
        *((kind, "hybrid", "", 2) for kind in ("resnet18", "alexnet_bn")),
        ("resnet18", "lazy", "pp2", 4), ("resnet18", "dear", "pp2", 4), ("alexnet_bn", "lazy", "tp2", 4),
    ],
)  # fmt: skip
def test_networks_follow_those_with_torchs_norms(kind: str, engine: str, layout: str, micro_batch: int):
    """Also with two micro-steps, in stages and in shards: they are far less apart than they have moved."""
    plain, fused = run(2, both, kind, engine, layout, micro_batch, fresh=True, limit_s=300)[0]
    start = network(kind).state_dict()
    assert list(plain) == list(fused) == list(start)
    for name, value in plain.items():
        moved = (value - start[name]).double().norm()
        assert (fused[name] - value).double().norm() <= 3e-3 * moved + 1e-7, name


def recipe_of(kind: str, fused: bool | str, **changes: Any) -> Recipe:
    return parse_recipe("test", tables(model={"kind": kind, "fused_norm": fused}, data__image_size=67, **changes))


def networks_agree() -> None:
    for kind, side in (("resnet18", 40), ("alexnet_bn", 67)):
        plain, fused = network(kind).to(DEVICE), network(kind).to(DEVICE)
        fuse_norms(fused, recipe_of(kind, True), DEVICE, FP32)
        batch = images((2, 3, side, side), FP32, 0)
        for model in (plain, fused):
            model.train(kind == "resnet18")(batch).square().sum().backward()  # AlexNet drops out at random
        for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 1e-3 * other.grad.norm(), name
        plain.load_state_dict(fused.state_dict())
        assert torch.equal(fused.eval()(batch), plain.eval()(batch))


def test_a_fused_network_has_the_gradients_of_the_plain_one_and_evaluates_alike(kernels: ForkedRanks):
    kernels.run(networks_agree)


def test_kernels_that_cannot_run_are_refused_or_told_of(capsys: pytest.CaptureFixture[str]):
    true = partial(recipe_of, "resnet18", True)
    refuses("fused_norm true .*compile true leaves that to torch; set model.fused_norm to 'auto'", true, compile=True)
    refuses("fused_norm true .*channels_last, which is false; set", true, channels_last=False)
    refuses("model.fused_norm is for model.kind", recipe_of, "cifarnet", True)
    assert not differences(recipe_tables(true()), recipe_of("resnet18", False)), "a run may be resumed with the other"
    model, cpu, gpu = network("resnet18"), torch.device("cpu"), torch.device("cuda")
    fuse_norms(model, recipe_of("resnet18", "auto"), cpu, FP32)
    refuses("and there is no GPU; set", fuse_norms, model, true(), cpu, FP32)
    fuse_norms(model, recipe_of("resnet18", "auto", compile=True), gpu, FP32)
    assert not capsys.readouterr().err, "nobody expects kernels there"
    with patch("imagenet_fast.models.factory.unusable", lambda *_: "a first one fails"):
        fuse_norms(model, recipe_of("resnet18", "auto"), gpu, FP32)
    assert capsys.readouterr().err == "warning: norms are torch's own, not fused: a first one fails\n"
    assert not any(module.fused for module in model.modules() if isinstance(module, FusedBatchNorm2d))
    missing = patch.dict("sys.modules", {"triton": None, "imagenet_fast.models.norm_kernels": None})
    with missing, patch.dict(os.environ, TRITON_INTERPRET="1"):
        assert unusable.__wrapped__(cpu, FP32).startswith("a first one fails (import of")
