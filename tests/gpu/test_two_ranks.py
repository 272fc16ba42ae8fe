"""The engines' contract and the collectives over NCCL: on two GPUs, or on one that both share where NCCL allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from imagenet_fast.bench.collectives import measure
from tests.ranks import run
from tests.sync import test_collectives as collectives
from tests.sync import test_contract as contract

pytestmark = pytest.mark.usefixtures("two_ranks")


def test_engines_keep_their_contract():
    ours, theirs = run(
        2, _in_turn, contract._every_engine, contract._awkward_models, contract._counts_launches, backend="nccl"
    )
    assert ours == theirs, "ranks differ in a bit"


def test_collectives_give_every_rank_the_mean_to_the_bit():
    ours, theirs = run(
        2,
        _in_turn,
        collectives._every_collective,
        collectives._fused_and_apart,
        collectives._large_values,
        backend="nccl",
    )
    assert ours == theirs, "ranks differ in a bit"


def test_all_reduces_are_timed_by_message_size():
    means = ["native", "ring", "butterfly", "pairwise", "torus2d", "parameter_server"]
    for blocks in run(2, measure, [4, 2**20], means, "bf16", 1, 0.1, True, backend="nccl"):
        assert list(blocks) == [(name, size) for size in (4, 2**20) for name in means]
        assert all(block.latency_s > 0 for of_kind in blocks.values() for block in of_kind)


def _in_turn(*functions: Callable[[], Any]) -> list[Any]:
    return [function() for function in functions]
