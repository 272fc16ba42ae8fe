"""The engines' contract and the collectives over NCCL, by two ranks. Run with `pytest tests/gpu` where there is a GPU.

Where there is one, they share it in turns, and a collective is said to take 9 ms. So engines have fixed buckets then.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from imagenet_fast.bench.collectives import measure
from imagenet_fast.recipe.sync_table import Collective
from tests.gpu.test_graphs import ON_GPU
from tests.gpu_semantics.test_replayed_steps import ENGINES, same
from tests.ranks import run
from tests.sync import test_collectives as collectives
from tests.sync import test_contract as contract
from tests.sync import test_powersgd as powersgd

SHARED = torch.cuda.device_count() < 2


@pytest.mark.parametrize("case", [case for case in contract.COVERED if case.place == contract.Place(2, 1)], ids=str)
def test_engines_keep_their_contract(case: contract.Case):
    if SHARED and case.engine == "auto":
        pytest.skip("auto times steps and plans: for two GPUs")
    ours, theirs = run(2, contract.average, case, not SHARED, backend="nccl")
    assert ours == theirs, "ranks differ in a bit"


@pytest.mark.parametrize("name", contract.NAMED)
def test_micro_steps_add_up(name: str):
    run(2, partial(contract.test_micro_steps_add_up, name=name), backend="nccl")


@pytest.mark.parametrize("collective", collectives.COLLECTIVES)
def test_collectives_give_every_rank_the_mean_to_the_bit(collective: Collective):
    ours, theirs = run(2, collectives.ends_with_the_mean, collective, 1, backend="nccl")
    assert ours == theirs, "ranks differ in a bit"


def test_collectives_add_alike_wherever_an_element_lies_and_overflow_nowhere():
    run(2, partial(collectives.test_wherever_an_element_lies_it_is_added_alike, world=2), backend="nccl")
    run(2, partial(collectives.test_large_fp16_values_do_not_overflow_on_their_way, world=2), backend="nccl")


def test_all_reduces_are_timed_by_message_size():
    means = ["native", "ring", "butterfly", "pairwise", "parameter_server"]
    for blocks in run(2, measure, [4, 2**20], means, "bf16", 1, 0.01, True, backend="nccl"):
        assert list(blocks) == [(name, size) for size in (4, 2**20) for name in means]
        assert all(block.latency_s > 0 for of_kind in blocks.values() for block in of_kind)


def test_products_of_powersgd_are_of_fp32_where_others_are_of_tf32():
    run(2, _recovered_beside_tf32, backend="nccl", fresh=True)


def _recovered_beside_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    powersgd.test_a_mean_of_low_rank_is_recovered_and_nothing_is_kept_of_it(dtype=torch.float32, near=1e-4)


@pytest.mark.parametrize("sync", ENGINES)
def test_replayed_steps_end_with_the_bits_of_launched_ones(sync: str):
    end = same(2, sync, **ON_GPU)
    assert {told["replayed"] for told in end.news} == {True}
