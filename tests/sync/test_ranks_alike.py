"""Ranks whose models or engines are not alike are told so when a pool is made, all of them, by the same sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import (
    DdpSync,
    Engine,
    EngineSettings,
    GradientPool,
    LazySync,
    PowerSgdSync,
    RingSync,
    attach,
    build_engine,
    declare,
)
from imagenet_fast.sync.consistency import _digests
from tests.ranks import run
from tests.sync.loops import Layers

Build = Callable[[], nn.Module]


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))


def seeded_by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def changed(change: Callable[[nn.Sequential], object], on: int = 1) -> nn.Module:
    model = network()
    if dist.get_rank() == on:
        change(model)
    return model


def widened(model: nn.Sequential) -> None:
    model[2] = nn.Linear(16, 6)


def lengthened(model: nn.Sequential) -> None:
    model.append(nn.Linear(5, 5))


def frozen(model: nn.Sequential) -> None:
    model[2].bias.requires_grad_(False)


def all_frozen(model: nn.Sequential) -> None:
    model.requires_grad_(False)


def swapped(model: nn.Sequential) -> None:
    """Two elements of the same layer."""
    with torch.no_grad():
        weight = model[2].weight
        weight[0], weight[1] = weight[1].clone(), weight[0].clone()


def halved(model: nn.Sequential) -> None:
    model[0].half()


def channels_last(model: nn.Sequential) -> None:
    model.to(memory_format=torch.channels_last)


MODELS: dict[str, Build] = {
    "0.weight has other values on rank 1 than on rank 0": seeded_by_rank,
    "2.weight has other values on rank 2 than on rank 0": partial(changed, swapped, 2),
    "2.weight is of shape (6, 16) on rank 1 and of shape (5, 16) on rank 0": partial(changed, widened),
    "parameter 5 is 3.weight on rank 2 and nothing on rank 0": partial(changed, lengthened, 2),
    "parameter 5 is nothing on rank 1 and 3.weight on rank 0": partial(changed, lengthened, 0),
    "2.bias is frozen on rank 1 and trained on rank 0": partial(changed, frozen),
    "0.weight is frozen on rank 2 and trained on rank 0": partial(changed, all_frozen, 2),
    "0.weight is of dtype torch.float16 on rank 1 and of dtype torch.float32 on rank 0": partial(changed, halved),
    "0.weight lies in memory with strides": partial(changed, channels_last),
    "parameter 1 is layer1.weight on rank 1 and layer0.weight on rank 0": lambda: Layers(
        (1, 0, 2, 3, 4) if dist.get_rank() else (0, 1, 2, 3, 4)
    ),
}


def test_models_that_differ_between_ranks_are_refused_on_all_of_them():
    told = run(3, _different_models)
    assert told[1:] == told[:1] * 2, "ranks say the same"
    for expected, sentence in zip(MODELS, told[0], strict=True):
        assert expected in sentence
        assert ";" in sentence, "and what to do"


def _different_models() -> list[str]:
    return [said(partial(_pool_of, build)) for build in MODELS.values()]


def _pool_of(build: Build) -> GradientPool:
    return GradientPool(build())


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


def _buffers() -> list[list[str]]:
    torch.manual_seed(0)
    told = []
    for alike in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            GradientPool(Buffered(alike)).close()
        told.append([str(warning.message) for warning in caught])
    return told


def test_buffers_that_differ_are_warned_of():
    """DDP copies those of rank 0."""
    for alike, others in run(3, _buffers):
        assert alike == []
        assert len(others) == 1
        assert "buffer features has other values on rank 1 than on rank 0, and will keep them" in others[0]


def test_other_engine_on_a_rank_is_refused():
    one, other = run(2, _different_engines)
    assert one == other
    expected = [
        "kind is ring on rank 1 and lazy on rank 0",
        "wire is bf16 on rank 1 and fp32 on rank 0",
        "threshold_mb is 2.0 on rank 1 and 1.0 on rank 0",
        "kind is ddp on rank 1 and lazy on rank 0",
        "rank is 4 on rank 1 and 2 on rank 0",
        "steps_per_epoch is 7 on rank 1 and 3 on rank 0",
        "wire is torch.bfloat16 on rank 1 and torch.float32 on rank 0",
    ]
    for sentence, wanted in zip(one, [*expected, "", ""], strict=True):
        assert wanted in sentence
        assert bool(sentence) == bool(wanted)


def _different_engines() -> list[str]:
    lazy, second = LazySync(wire="fp32", threshold_mb=1.0), dist.get_rank() == 1
    pairs: list[tuple[EngineSettings | DdpSync | Engine, EngineSettings | DdpSync | Engine]] = [
        (lazy, RingSync(wire="fp32")),
        (lazy, LazySync(wire="bf16", threshold_mb=1.0)),
        (lazy, LazySync(wire="fp32", threshold_mb=2.0)),
        (lazy, DdpSync(wire="fp32")),
        (PowerSgdSync(rank=2, timing="lazy"), PowerSgdSync(rank=4, timing="lazy")),
    ]
    sentences = [said(partial(attach, network(), pair[second])) for pair in pairs]
    pool = GradientPool(network())
    sentences.append(said(partial(build_engine, lazy, pool, 7 if second else 3)))
    declared = [declare(LazySync(wire=wire, threshold_mb=1.0)) for wire in ("fp32", "bf16")]
    sentences.append(said(partial(build_engine, declared[second], pool)))
    sentences += [said(partial(build_engine, engine, pool)) for engine in (declared[0], lazy)]
    return sentences


def test_pools_of_some_ranks_compare_only_these():
    assert run(4, _in_pairs) == [True] * 4


def _in_pairs() -> bool:
    """As where tensor parallel ranks hold shards of their own."""
    rank = dist.get_rank()
    groups = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    torch.manual_seed(rank % 2)
    model = nn.Sequential(nn.Linear(2, 3 + rank % 2))
    pool = GradientPool(model, groups[rank % 2])
    pool.attach(build_engine(LazySync(wire="fp32" if rank % 2 else "bf16"), pool))
    with torch.no_grad():
        model[0].weight += rank // 2
    wrong = said(lambda: GradientPool(model, groups[rank % 2]))
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
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.bool,
    ):
        few = torch.tensor([0, 1, 2]).to(dtype)
        assert digest_of(few) == digest_of(few.clone())
        assert digest_of(few) != digest_of(few.flip(0))
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert digest_of(channels_last) == digest_of(channels_last.contiguous())
    assert digest_of(torch.empty(3, device="meta")) == digest_of(torch.empty(0))
