"""Steps counted on ranks that are not there: by arithmetic where that is easy, and as the project promises at 512."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from imagenet_fast.bench.comm_volume import Count, bench_count, stated_link
from imagenet_fast.recipe.engine_table import Collective
from imagenet_fast.recipe.sync_config import HybridSync, LazySync, SparseSync, Sync
from tests.bench.small import SMALL, benched

BYTES = 2 * SMALL.elements
"""Of its gradients, in 16 bits."""


def count(settings: Sync, ranks: int, ranks_per_node: int) -> Count:
    (row,) = bench_count(SMALL, [settings], str(ranks), ranks_per_node, "56gbit")
    return row


def fused(collective: Collective, ranks: int, ranks_per_node: int) -> Count:
    """Everything in one message."""
    return count(LazySync(threshold_mb=math.inf, collective=collective), ranks, ranks_per_node)


@pytest.mark.ci
def test_512_ranks_of_alexnet_need_few_calls_and_bytes(tmp_path: Path):
    rows, printed = benched(tmp_path, "sync --count --model alexnet --ranks 64,512", drawn=False)
    assert "alexnet, nodes of 8 ranks, bf16: counted, without a network" in printed
    assert [(row["engine"], row["ranks"]) for row in rows] == [
        (engine, ranks) for engine in ("lazy", "dear", "ring", "hybrid", "sparse") for ranks in (64, 512)
    ]
    for row in rows:
        assert (row["wire"], row["model"], row["ranks_per_node"]) == ("bf16", "alexnet", 8)
        assert row["messages"] >= row["calls"] > 0
        assert row["kernels"] > 16  # a gradient each comes into the pool
        assert row["smallest_message"] > 0
        assert row["host_ms"] > 0
        assert row["collective"]
    for fewer, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["calls"] <= (150 if row["engine"] in ("hybrid", "sparse") else 60)
        assert row["calls"] <= 2 * fewer["calls"]
        assert row["least_nic_bytes"] <= row["nic_bytes"] <= 1.05 * row["least_nic_bytes"]


def test_hierarchical_is_four_calls_with_least_nic_bytes():
    row = fused("hierarchical", 16, 4)
    assert (row.calls, row.messages, row.collective) == (4, 3 + 3 + 3 + 3, "hierarchical")
    assert row.least_nic_bytes == 2 * 3 / 4 * BYTES
    assert row.nic_bytes == pytest.approx(row.least_nic_bytes, rel=0.01)  # and padding
    assert row.smallest_message == pytest.approx(BYTES / 16, rel=0.01)


def test_a_ring_of_all_ranks_leaves_each_node_once():
    row = fused("native", 16, 4)
    assert (row.calls, row.messages) == (1, 30)
    assert row.nic_bytes == pytest.approx(2 * 15 / 16 * BYTES, rel=0.01)


def test_a_parameter_server_answers_all_other_nodes_through_its_own_nic():
    assert fused("parameter_server", 16, 4).nic_bytes == pytest.approx(12 * BYTES, rel=0.01)


def test_of_three_nodes_it_is_the_second_that_a_butterfly_burdens():
    row = fused("butterfly", 3, 1)
    assert row.calls == 4  # half of it there and back, before that the first node's and after it the mean for that one
    assert row.nic_bytes == pytest.approx(2 * BYTES, rel=0.01)


def test_one_node_has_nothing_to_send_and_one_rank_calls_nobody():
    node, rank = fused("native", 8, 8), fused("native", 1, 1)
    assert (node.calls, node.messages, node.nic_bytes, node.least_nic_bytes) == (1, 14, 0, 0)
    assert (rank.calls, rank.messages, rank.smallest_message) == (0, 0, None)


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


def test_stated_link_bandwidth_and_latency():
    assert stated_link(64, 8, 56e9).s_per_byte == pytest.approx(2 * 63 / 64 / (0.9 * 7e9))
    assert stated_link(1, 8, 56e9).s_per_byte == 0
    latencies = [stated_link(nodes, 8, 56e9).latency_s for nodes in (1, 8, 64)]
    assert latencies[2] - latencies[1] == pytest.approx(latencies[1] - latencies[0])
