"""All-reduces by message size: gloo's own and ours. Those over a shaped network are in tests/netlab."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.bench.collectives import bench_collectives, check, parse_sizes
from imagenet_fast.metrics.tables import table
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.units import size_text
from tests.ranks import with_ranks

FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "none": lambda mean, own: None,
    "does nothing": lambda mean, own: mean.copy_(own),
    "is not divided": lambda mean, own: mean.mul_(2),
    "leaves out the first": lambda mean, own: mean[:1].copy_(own[:1]),
    "leaves out the last": lambda mean, own: mean[-1:].copy_(own[-1:]),
    "moves the parts": lambda mean, own: mean.copy_(mean.roll(1)),
}
"""What makes of a mean, and of a rank's own values, a wrong mean."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
@with_ranks(2)
def test_an_all_reduce_that_averages_is_right_and_a_wrong_one_does_not_win_by_being_fast(
    fault: str, dtype: torch.dtype
):
    message = torch.empty(64, dtype=dtype)

    def once() -> None:
        own = message.clone()
        dist.all_reduce(message)
        FAULTS[fault](message.div_(2), own)

    with nullcontext() if fault == "none" else pytest.raises(AssertionError, match="come out wrong"):
        check(once, message, sums=False)


@pytest.mark.usefixtures("subprocesses")
def test_ranks_of_one_machine_take_part_in_all_that_can_be():
    rows = bench_collectives(Lab(3, 1), [1, 2], None, "fp16", "cpu", rounds=1, block_s=0.0)
    assert [row.collective for row in rows] == [name for name in get_args(Collective) if name != "hierarchical"]
    assert {row.bytes for row in rows} == {3 * 2}, "a message has a part for each rank"
    assert all(row.utilisation is None and row.kernel_bytes is None for row in rows)
    shown = table(rows)
    assert str(shown.title) == "all-reduces by message size: 3 nodes, loopback"
    assert "link use" not in [column.header for column in shown.columns]
    assert "6B" in map(str, shown.columns[3].cells)


def test_sizes_are_a_list_of_ranges_with_both_ends():
    for text, sizes in (
        ("2KB", [2048]),
        ("2k..16KiB", [2048, 4096, 8192, 16384]),
        ("2KB..64KB:4", [2048, 8192, 32768, 65536]),
        ("1MB, 7b,3..11", [3, 6, 7, 11, 2**20]),
        ("1KB..4KB,2KB", [1024, 2048, 4096]),
        ("5..5", [5]),
    ):
        assert parse_sizes(text) == sizes
    assert [size_text(size) for size in (6, 2048, 2052, 3 * 2**20)] == ["6B", "2KB", "2052B", "3MB"]
