"""Ranks whose models or engines are not alike are told so when a pool is made, all of them, by the same sentence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.distributed.consistency import _digest
from imagenet_fast.parallel.ddp import attach
from imagenet_fast.sync import DdpSync, GradientPool, LazySync, PowerSgdSync, RingSync, declare
from tests.ranks import with_ranks
from tests.sync.given import pooled, process_groups
from tests.sync.loops import Layers


def said(work: Callable[..., object], *arguments: object) -> str:
    """The sentence of all ranks."""
    sentence = ""
    try:
        work(*arguments)
    except ValueError as error:
        sentence = str(error)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, sentence)
    assert len(set(everyones)) == 1
    return sentence


def changed(change: Callable[[Any], object], on: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    if dist.get_rank() == on:
        change(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "different weights: 0.weight is of checksum ... on rank 1 and of checksum ... on rank 0": lambda: changed(
        lambda model: nn.init.ones_(model[0].weight)
    ),
    "2.weight is of shape (6, 16) on rank 1 and of shape (5, 16) on rank 0": lambda: changed(
        lambda model: setattr(model, "2", nn.Linear(16, 6))
    ),
    "parameter 5 is 3.weight on rank 2 and nothing on rank 0": lambda: changed(
        lambda model: model.append(nn.Linear(5, 5)), 2
    ),
    "0.weight is frozen on rank 2 and trained on rank 0": lambda: changed(lambda model: model.requires_grad_(False), 2),
    "0.weight is of dtype torch.float16 on rank 1 and of dtype torch.float32 on rank 0": lambda: changed(
        lambda model: model[0].half()
    ),
    "0.weight is in memory with strides": lambda: changed(lambda model: model.to(memory_format=torch.channels_last)),
    "parameter 1 is layer1.weight on rank 1 and layer0.weight on rank 0": lambda: Layers(
        (1, 0, 2, 3, 4) if dist.get_rank() == 1 else (0, 1, 2, 3, 4)
    ),
    "0.weight is on meta on rank 1 and on cpu on rank 0": lambda: changed(lambda model: model.to("meta")),
    "0.weight is on the meta device; call the model's to_empty() and load its weights before": lambda: changed(
        lambda _: None
    ).to("meta"),
}


@pytest.mark.parametrize("sentence", MODELS)
@with_ranks(3)
def test_models_that_differ_between_ranks_are_refused_on_all_of_them(sentence: str) -> None:
    model = MODELS[sentence]()
    model.register_buffer("features", torch.tensor(dist.get_rank() % 2))  # what is refused is said before
    told = said(GradientPool, model, LAZY)
    assert all(part in told for part in [*sentence.split(" ... "), "; "])


@pytest.mark.parametrize("alike", [True, False])
@with_ranks(3)
def test_buffers_that_differ_are_warned_of(alike: bool) -> None:
    """DDP copies those of rank 0. Statistics of norms are each rank's own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(dist.get_rank())
    model.register_buffer("features", torch.tensor(0 if alike else dist.get_rank()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GradientPool(model, LAZY).close()
    told = [str(warning.message) for warning in caught]
    assert len(told) == (0 if alike else 1)
    assert all(
        re.search(r"buffers stay different, .*: features is of checksum \w+ on rank 1 and of", one) for one in told
    )


LAZY = LazySync(wire="fp32", threshold_mb=1.0)
OWN, OTHER_OWN = (declare(LazySync(wire="fp32", threshold_mb=size)) for size in (1.0, 2.0))
ENGINES: dict[str, tuple[Any, Any]] = {
    "kind is ring on rank 1 and lazy on rank 0": (LAZY, RingSync(wire="fp32")),
    "wire is bf16 on rank 1 and fp32 on rank 0": (LAZY, LazySync(wire="bf16", threshold_mb=1.0)),
    "kind is ddp on rank 1 and lazy on rank 0": (LAZY, DdpSync(wire="fp32")),
    "rank is 4 on rank 1 and 2 on rank 0": tuple(PowerSgdSync(rank=rank, timing="lazy") for rank in (2, 4)),
    "steps_per_epoch is 7 on rank 1 and 3 on rank 0": (LAZY, LAZY),
    "bucket_bytes is 2097152.0 on rank 1 and 1048576.0 on rank 0": (OWN, OTHER_OWN),
    "": (LAZY, LAZY),
    "no difference of one's own": (OWN, OWN),
}


@pytest.mark.parametrize("sentence", ENGINES)
@with_ranks(2)
def test_other_engine_on_a_rank_is_refused(sentence: str) -> None:
    engine, syncs = ENGINES[sentence][dist.get_rank()], list[Any]()
    steps = [3, 7][dist.get_rank()] if "steps" in sentence else 1
    told = said(lambda: syncs.append(attach(changed(bool), engine, steps)[1]))
    for sync in syncs:
        sync.close()
    assert sentence in told if " is " in sentence else not told


@with_ranks(4)
def test_pools_of_some_ranks_compare_only_these() -> None:
    """As where tensor parallel ranks hold shards of their own."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 3 + rank % 2))
    with process_groups((0, 2), (1, 3)) as groups:
        nn.init.constant_(model[0].weight, rank % 2)
        pooled(model, LazySync(wire="fp32" if rank % 2 else "bf16"), group=groups[rank % 2]).close()
        nn.init.constant_(model[0].weight, rank)
        with pytest.raises(
            ValueError, match=rf"weight is of checksum \w+ on rank {2 + rank % 2} and .* on rank {rank % 2};"
        ):
            GradientPool(model, LAZY, groups[rank % 2])


def test_every_bit_counts_and_the_order_in_memory_does_not():
    values = torch.randn(3, 700)
    nearest = values.clone()
    nearest[1, 300] = torch.nextafter(values[1, 300], torch.tensor(9.0))
    others = (nearest, values.flip(0), values.flip(1), -values, values[:, :-1])
    assert len({_digest(tensor) for tensor in (values, *others)}) == 6
    assert _digest(torch.zeros(3)) != _digest(-torch.zeros(3))
    for dtype in (torch.bfloat16, torch.complex64, torch.bool):
        few = torch.tensor([0, 1, 2]).to(dtype)
        assert _digest(few) == _digest(few.clone()) != _digest(few.flip(0))
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert _digest(channels_last) == _digest(channels_last.contiguous())
