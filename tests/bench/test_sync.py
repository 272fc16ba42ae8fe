"""`bench sync` on this node's own network: counted steps, the papers' tables, and the pace of a replayed model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from imagenet_fast.bench import replay
from imagenet_fast.bench.comm_volume import Count, bench_count
from imagenet_fast.bench.replay import Pace
from imagenet_fast.recipe.sync_config import HybridSync, LazySync, SparseSync, Sync
from tests.bench.small import SMALL, benched

BYTES = 2 * SMALL.elements
"""Of its gradients, in 16 bits."""


def count(settings: Sync, ranks: int, ranks_per_node: int) -> Count:
    (row,) = bench_count(SMALL, [settings], [ranks], ranks_per_node, "56gbit")
    return row


@pytest.mark.ci
def test_512_ranks_of_alexnet_need_few_calls_and_bytes(tmp_path: Path):
    rows, printed = benched(tmp_path, "count --model alexnet --ranks 64,512", drawn=False)
    assert "alexnet, nodes of 8 ranks: counted, without a network" in printed
    assert [(row["engine"], row["ranks"]) for row in rows] == [
        (engine, ranks) for engine in ("lazy", "dear", "ring", "hybrid", "sparse") for ranks in (64, 512)
    ]
    for row in rows:
        assert row["messages"] >= row["calls"] > 0
        assert row["kernels"] > 16  # a gradient each comes into the pool
    for fewer, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["calls"] <= (150 if row["engine"] in ("hybrid", "sparse") else 60)
        assert row["calls"] <= 2 * fewer["calls"]
        assert row["least_nic_bytes"] <= row["nic_bytes"] <= 1.05 * row["least_nic_bytes"]


def test_messages_and_bytes_by_arithmetic():
    for collective, ranks, each, calls, messages, sent in (
        ("hierarchical", 16, 4, 4, 3 + 3 + 3 + 3, 2 * 3 / 4),
        ("native", 16, 4, 1, 30, 2 * 15 / 16),  # a ring of all ranks leaves each node once
        ("parameter_server", 16, 4, None, None, 12),  # answers all other nodes through its own NIC
        ("butterfly", 3, 1, 4, None, 2),  # half to the second and back, the first's before that and its mean after it
        ("native", 8, 8, 1, 14, 0),  # within a node
        ("native", 1, 1, 0, 0, 0),
    ):
        row = count(LazySync(threshold_mb=math.inf, collective=collective), ranks, each)
        assert calls in (None, row.calls)
        assert messages in (None, row.messages)
        assert row.collective == collective
        assert row.nic_bytes == pytest.approx(sent * BYTES, rel=0.01)
        if collective == "hierarchical":
            assert row.least_nic_bytes == 2 * 3 / 4 * BYTES
            assert row.smallest_message == pytest.approx(BYTES / 16, rel=0.01)
        if ranks == each:
            assert (row.nic_bytes, row.least_nic_bytes) == (0, 0)


def test_sparse_is_counted_past_its_ramp():
    sparse = count(SparseSync(chunk=4096), 16, 4)
    chunks = math.ceil(SMALL.elements / 4096)
    norms = 2 * 3 / 4 * 4 * chunks
    assert sparse.least_nic_bytes == pytest.approx(2 * 3 / 4 * 2 * 4096 * math.ceil(chunks / 8) + norms, rel=0.05)
    assert sparse.least_nic_bytes <= sparse.nic_bytes <= 1.05 * sparse.least_nic_bytes
    assert sparse.calls == 4 + 3  # the chunks as lazy does; the norms, in fp32, are added by the backend between nodes


def test_layers_on_the_meta_device_are_updated_each_before_it_is_read():
    """None of them has a place in memory, by which they could be taken for tied ones."""
    assert count(HybridSync(fuse_mb=0), 8, 8).updates > 1


class Clock:
    """By which every sleep lasts ``late`` seconds longer."""

    def __init__(self, late: float) -> None:
        self.now, self._late = 5.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self._late


def test_a_layer_that_was_woken_late_makes_up_for_it_in_the_next_ones(monkeypatch: pytest.MonkeyPatch):
    """But not for what is done between two of them."""
    for late, busy, lasts in ((0.0, 0.0, 10.0), (0.25, 0.0, 10.25), (1.75, 0.0, 10.75), (0.0, 0.5, 15.0)):
        clock, pace = Clock(late), Pace()
        monkeypatch.setattr(replay, "time", clock)
        for _ in range(10):
            pace.nap(1.0)
            clock.now += busy
        assert clock.now - 5.0 == pytest.approx(lasts)
