"""The engines' contract and the collectives over NCCL, on two GPUs or, where NCCL allows it, on one that ranks share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.spawning import run
from tests.sync import test_collectives as collectives
from tests.sync import test_contract as contract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine"),
]


@pytest.fixture(scope="module", autouse=True)
def _two_ranks() -> None:
    """Skips, in NCCL's own words, where two ranks may not share the GPU there is."""
    try:
        assert run(2, _sum_of_ranks, backend="nccl") == [1, 1]
    except AssertionError as failure:
        if torch.cuda.device_count() > 1 or "DistBackendError" not in str(failure):
            raise
        version = ".".join(map(str, torch.cuda.nccl.version()))
        pytest.skip(f"NCCL {version} refuses two ranks on one GPU: {str(failure).strip().splitlines()[-1]}")


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def test_after_its_update_every_parameter_has_moved_by_the_mean():
    ours, theirs = run(2, contract._every_engine, backend="nccl")
    assert ours == theirs, "ranks differ in a bit"


def test_accumulation_unused_and_shared_parameters():
    run(2, contract._awkward_models, backend="nccl")


def test_lazy_fuses_until_its_threshold():
    run(2, contract._counts_launches, backend="nccl")


def test_every_rank_ends_with_the_mean_to_the_bit():
    ours, theirs = run(2, collectives._every_collective, backend="nccl")
    assert ours == theirs


def test_butterfly_and_pairwise_add_alike_wherever_an_element_lies():
    run(2, collectives._fused_and_apart, backend="nccl")


def test_large_fp16_values_do_not_overflow_on_their_way():
    run(2, collectives._large_values, backend="nccl")
