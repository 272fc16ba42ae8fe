"""Ranks whose models or engines are not alike are told so when a pool is made, all of them, by the same sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import DdpSync, GradientPool, LazySync, PowerSgdSync, RingSync, attach, build_engine, declare
from imagenet_fast.sync.consistency import _digests
from tests.ranks import run
from tests.sync.given import pooled, process_groups
from tests.sync.loops import Layers


def said(work: Callable[..., object], *arguments: object) -> str:
    try:
        work(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))


def changed(change: Callable[[nn.Sequential], object], on: int = 1) -> nn.Module:
    model = network()
    if dist.get_rank() == on:
        change(model)
    return model


def seeded_by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@torch.no_grad()
def swap(model: nn.Sequential) -> None:
    """Two elements of the same layer."""
    weight = model[2].weight
    weight[0], weight[1] = weight[1].clone(), weight[0].clone()


def orders() -> nn.Module:
    return Layers((1, 0, 2, 3, 4) if dist.get_rank() else (0, 1, 2, 3, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "0.weight has other values on rank 1 than on rank 0": seeded_by_rank,
    "2.weight has other values on rank 2 than on rank 0": lambda: changed(swap, 2),
    "2.weight is of shape (6, 16) on rank 1 and of shape (5, 16) on rank 0": lambda: changed(
        lambda model: setattr(model, "2", nn.Linear(16, 6))
    ),
    "parameter 5 is 3.weight on rank 2 and nothing on rank 0": lambda: changed(
        lambda model: model.append(nn.Linear(5, 5)), 2
    ),
    "parameter 5 is nothing on rank 1 and 3.weight on rank 0": lambda: changed(
        lambda model: model.append(nn.Linear(5, 5)), 0
    ),
    "2.bias is frozen on rank 1 and trained on rank 0": lambda: changed(
        lambda model: model[2].bias.requires_grad_(False)
    ),
    "0.weight is frozen on rank 2 and trained on rank 0": lambda: changed(lambda model: model.requires_grad_(False), 2),
    "0.weight is of dtype torch.float16 on rank 1 and of dtype torch.float32 on rank 0": lambda: changed(
        lambda model: model[0].half()
    ),
    "0.weight lies in memory with strides": lambda: changed(lambda model: model.to(memory_format=torch.channels_last)),
    "parameter 1 is layer1.weight on rank 1 and layer0.weight on rank 0": orders,
}


@pytest.mark.parametrize("sentence", MODELS)
def test_models_that_differ_between_ranks_are_refused_on_all_of_them(sentence: str):
    first, *others = run(3, _different_models, sentence)
    assert others == [first] * 2, "ranks say the same"
    assert sentence in first
    assert ";" in first, "and what to do"


def _different_models(sentence: str) -> str:
    return said(GradientPool, MODELS[sentence]())


def _on_meta() -> list[str]:
    with torch.device("meta"):
        everywhere = said(lambda: GradientPool(network()))
    with torch.device("meta" if dist.get_rank() else "cpu"):
        return [everywhere, said(lambda: GradientPool(network()))]


def test_models_on_the_meta_device_are_refused():
    for everywhere, on_one in run(2, _on_meta):
        assert "0.weight is on the meta device; call the model's to_empty() and load its weights before" in everywhere
        assert "0.weight is on meta on rank 1 and on cpu on rank 0" in on_one


class Buffered(nn.Module):
    """With a norm, whose statistics are each rank's own, and random features drawn by the rank's seed."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        torch.manual_seed(0 if alike else dist.get_rank())
        self.register_buffer("features", torch.randn(4, 4))
        with torch.no_grad():
            self.layers[1].running_mean.fill_(dist.get_rank())


def _warned(alike: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        GradientPool(Buffered(alike)).close()
    return [str(warning.message) for warning in caught]


def test_buffers_that_differ_are_warned_of():
    """DDP copies those of rank 0."""
    assert run(3, _warned, True) == [[]] * 3
    for (warning,) in run(3, _warned, False):
        assert "buffer features has other values on rank 1 than on rank 0, and will keep them" in warning


LAZY = LazySync(wire="fp32", threshold_mb=1.0)
DECLARED = [declare(LazySync(wire=wire, threshold_mb=1.0)) for wire in ("fp32", "bf16")]
ENGINES: dict[str, Sequence[tuple[Any, ...]]] = {
    "kind is ring on rank 1 and lazy on rank 0": [(LAZY,), (RingSync(wire="fp32"),)],
    "wire is bf16 on rank 1 and fp32 on rank 0": [(LAZY,), (LAZY.model_copy(update={"wire": "bf16"}),)],
    "threshold_mb is 2.0 on rank 1 and 1.0 on rank 0": [(LAZY,), (LazySync(wire="fp32", threshold_mb=2.0),)],
    "kind is ddp on rank 1 and lazy on rank 0": [(LAZY,), (DdpSync(wire="fp32"),)],
    "rank is 4 on rank 1 and 2 on rank 0": [(PowerSgdSync(rank=rank, timing="lazy"),) for rank in (2, 4)],
    "steps_per_epoch is 7 on rank 1 and 3 on rank 0": [(LAZY, 3), (LAZY, 7)],
    "wire is torch.bfloat16 on rank 1 and torch.float32 on rank 0": [(engine,) for engine in DECLARED],
    "no difference": [(LAZY,), (LAZY,)],
    "no difference of one's own": [(DECLARED[0],), (DECLARED[0],)],
}


@pytest.mark.parametrize("sentence", ENGINES)
def test_other_engine_on_a_rank_is_refused(sentence: str):
    one, other = run(2, _different_engines, sentence)
    assert one == other
    assert sentence in one if " is " in sentence else not one


def _different_engines(sentence: str) -> str:
    syncs: list[Any] = []
    told = said(lambda: syncs.append(attach(network(), *ENGINES[sentence][dist.get_rank()])[1]))
    if "ddp" not in sentence:
        engine, *steps = ENGINES[sentence][dist.get_rank()]
        engines: list[Any] = []
        assert said(lambda: engines.append(build_engine(engine, GradientPool(network()), *steps))) == told
        syncs += engines
    for sync in syncs:
        sync.close()
    return told


def test_pools_of_some_ranks_compare_only_these():
    assert run(4, _in_pairs) == [True] * 4


def _in_pairs() -> bool:
    """As where tensor parallel ranks hold shards of their own."""
    rank = dist.get_rank()
    torch.manual_seed(rank % 2)
    model = nn.Sequential(nn.Linear(2, 3 + rank % 2))
    with process_groups((0, 2), (1, 3)) as groups:
        pool = pooled(model, LazySync(wire="fp32" if rank % 2 else "bf16"), group=groups[rank % 2])
        with torch.no_grad():
            model[0].weight += rank // 2
        wrong = said(GradientPool, model, groups[rank % 2])
        pool.close()
    return f"0.weight has other values on rank {2 + rank % 2} than on rank {rank % 2}" in wrong


def digest_of(values: Tensor) -> int:
    return _digests([values])[0]


def test_a_digest_tells_any_bytes_apart():
    torch.manual_seed(0)
    values = torch.randn(3, 700_001)
    seen = {digest_of(values)}
    for change in range(5):
        other = values.clone()
        other[change % 3, change * 175_000] = torch.nextafter(other[change % 3, change * 175_000], torch.tensor(9.0))
        seen.add(digest_of(other))
    seen |= {digest_of(values.flip(0)), digest_of(values.flip(1)), digest_of(-values), digest_of(values[:, :-1])}
    assert len(seen) == 10
    assert digest_of(torch.zeros(3)) != digest_of(-torch.zeros(3))
    for dtype in ("float16", "bfloat16", "float64", "complex64", "complex128", "uint8", "bool"):
        few = torch.tensor([0, 1, 2]).to(getattr(torch, dtype))
        assert digest_of(few) == digest_of(few.clone())
        assert digest_of(few) != digest_of(few.flip(0))
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert digest_of(channels_last) == digest_of(channels_last.contiguous())
    assert digest_of(torch.empty(3, device="meta")) == digest_of(torch.empty(0))
