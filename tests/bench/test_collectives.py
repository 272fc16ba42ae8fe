"""All-reduces by message size: gloo's own, ours and MPI's. Those over a shaped network are in test_shaped_network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.bench import mpi
from imagenet_fast.bench.collectives import bench_collectives, check, parse_collectives, parse_sizes
from imagenet_fast.bench.netns import parse_rate
from imagenet_fast.bench.tables import bandwidth_table
from imagenet_fast.units import size_text
from tests.conftest import refusal_of
from tests.ranks import run

FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "none": lambda mean, own: None,
    "does nothing": lambda mean, own: mean.copy_(own),
    "is not divided": lambda mean, own: mean.mul_(2),
    "leaves out the first": lambda mean, own: mean[:1].copy_(own[:1]),
    "leaves out the last": lambda mean, own: mean[-1:].copy_(own[-1:]),
    "moves the parts": lambda mean, own: mean.copy_(mean.roll(1)),
}
"""What makes of a mean, and of a rank's own values, a wrong mean."""


def checked(fault: str, dtype: torch.dtype) -> bool:
    """Return whether an all-reduce with a fault passes for one that averages."""
    message = torch.empty(64, dtype=dtype)

    def once() -> None:
        own = message.clone()
        dist.all_reduce(message)
        message.div_(dist.get_world_size())
        FAULTS[fault](message, own)

    try:
        check(once, message, sums=False)
    except AssertionError:
        return False
    return True


def every_check() -> dict[str, list[bool]]:
    """Whether each kind of all-reduce passes, in each type."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {fault: [checked(fault, dtype) for dtype in dtypes] for fault in FAULTS}


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_that_averages_is_right_and_a_wrong_one_does_not_win_by_being_fast(ranks: int):
    for found in run(ranks, every_check):
        assert all(found.pop("none"))
        if ranks == 2:  # of three, the one in the middle has the mean as its own
            assert not any(passed for each in found.values() for passed in each), found


@pytest.mark.parametrize("part", [slice(0), slice(-1)], ids=["nothing", "but the last"])
def test_nor_does_a_wrong_sum_of_mpi(part: slice):
    def all_reduce(place: object, values: np.ndarray) -> None:
        values[part] *= 3  # ranks have 1 and 2

    ranks = SimpleNamespace(rank=0, size=2, Allreduce=all_reduce)
    with pytest.raises(AssertionError, match="not that of the ranks"):
        mpi._answer(Mock(recv=lambda: (64, 1, True)), SimpleNamespace(COMM_WORLD=ranks, IN_PLACE=None), counted=False)


@pytest.mark.usefixtures("subprocesses")
def test_ranks_of_one_machine_take_part_in_all_that_can_be():
    rows = bench_collectives("1,2", None, 3, 1, None, "fp16", "cpu", rounds=1, block_s=0.0)
    assert {row.collective for row in rows} == set(parse_collectives(None, levels=False, gpus=False))
    assert {row.bytes for row in rows} == {3 * 2}, "a message has a part for each rank"
    assert len(rows) == len({row.collective for row in rows})
    assert all(row.utilisation is None and row.kernel_bytes is None for row in rows)
    table = bandwidth_table(rows)
    assert "3 ranks, loopback, fp16" in str(table.title)
    assert str(next(iter(table.columns[0].cells))) == "6 B"


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
    assert [size_text(size) for size in (6, 2048, 2052, 3 * 2**20)] == ["6 B", "2 KB", "2.004 KB", "3 MB"]


def test_a_rate_is_read_in_tcs_notation():
    rates = {"250mbit": 250_000_000, "1.5gbit": 1_500_000_000, "8kbit": 8000}
    assert {text: parse_rate(text) for text in rates} == rates
    for wrong in ("-1gbit", "0mbit", "1.gbit", "1,5gbit", "1e3mbit", "1 gbit", "10gb", "gbit", ""):
        assert "is not a number with kbit, mbit or gbit" in refusal_of(parse_rate, wrong)


def test_mpi_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    told = refusal_of(parse_collectives, "ring,mpi", levels=False, gpus=False)
    assert "there is no mpi4py; `pip install mpi4py mpich`" in told
    assert "mpi" not in parse_collectives(None, levels=False, gpus=False)
    assert "mpi is left out, since there is no mpi4py" in capsys.readouterr().err


def test_mpi_is_not_asked_to_send_from_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert "add --device cpu, or leave mpi out" in refusal_of(parse_collectives, "mpi", levels=False, gpus=True)
    assert "mpi" not in parse_collectives(None, levels=False, gpus=True)
    assert not capsys.readouterr().err
