"""Steps counted on ranks that are not there: by arithmetic where that is easy, and as the project promises at 512."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from imagenet_fast.bench.comm_volume import Count, bench_count, stated_link
from imagenet_fast.cli.main import app
from imagenet_fast.recipe.engine_table import Collective
from imagenet_fast.recipe.sync_config import HybridSync, LazySync, SparseSync, Sync
from tests.bench.small import SMALL
from tests.e2e.command import in_process

BYTES = 2 * SMALL.elements
"""Of its gradients, in 16 bits."""


def lazy(collective: Collective) -> LazySync:
    """Everything in one message."""
    return LazySync(threshold_mb=math.inf, collective=collective)


def count(settings: Sync, ranks: int, ranks_per_node: int) -> Count:
    (row,) = bench_count(SMALL, [settings], str(ranks), ranks_per_node, "56gbit")
    return row


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    file = tmp_path_factory.mktemp("count") / "rows.json"
    printed = in_process("bench", "sync", "--count", "--model", "alexnet", "--ranks", "64,512", "--json", str(file))
    assert "alexnet, nodes of 8 ranks, bf16: counted, without a network" in printed
    assert all(len(line) <= 80 for line in printed.splitlines()), printed
    table: list[dict[str, float]] = json.loads(file.read_text())
    return table


def test_there_is_a_row_an_engine_and_number_of_ranks_with_every_figure(rows: list[dict[str, float]]):
    assert [(row["engine"], row["ranks"]) for row in rows] == [
        (engine, ranks) for engine in ("lazy", "dear", "ring", "hybrid", "sparse") for ranks in (64, 512)
    ]
    asked = {
        "engine", "wire", "collective", "model", "ranks", "ranks_per_node", "calls", "messages", "smallest_message",
        "kernels", "host_ms", "nic_bytes", "least_nic_bytes",
    }  # fmt: skip
    for row in rows:
        assert asked <= set(row)
        assert (row["wire"], row["model"], row["ranks_per_node"]) == ("bf16", "alexnet", 8)
        assert row["messages"] >= row["calls"] > 0
        assert row["kernels"] > 16  # a gradient each comes into the pool
        assert row["smallest_message"] > 0


def test_512_ranks_need_few_calls_and_bytes(rows: list[dict[str, float]]):
    for fewer, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["calls"] <= (150 if row["engine"] in ("hybrid", "sparse") else 60)
        assert row["calls"] <= 2 * fewer["calls"]
        assert row["least_nic_bytes"] <= row["nic_bytes"] <= 1.05 * row["least_nic_bytes"]


def test_hierarchical_is_four_calls_with_least_nic_bytes():
    row = count(lazy("hierarchical"), 16, 4)
    assert (row.calls, row.messages, row.collective) == (4, 3 + 3 + 3 + 3, "hierarchical")
    assert row.least_nic_bytes == 2 * 3 / 4 * BYTES
    assert row.nic_bytes == pytest.approx(row.least_nic_bytes, rel=0.01)  # and padding
    assert row.smallest_message == pytest.approx(BYTES / 16, rel=0.01)


def test_a_ring_of_all_ranks_leaves_each_node_once():
    row = count(lazy("native"), 16, 4)
    assert (row.calls, row.messages) == (1, 30)
    assert row.nic_bytes == pytest.approx(2 * 15 / 16 * BYTES, rel=0.01)


def test_a_parameter_server_answers_all_other_nodes_through_its_own_nic():
    row = count(lazy("parameter_server"), 16, 4)
    assert row.nic_bytes == pytest.approx(12 * BYTES, rel=0.01)


def test_of_three_nodes_it_is_the_second_that_a_butterfly_burdens():
    row = count(lazy("butterfly"), 3, 1)
    assert row.calls == 4  # half of it there and back, before that the first node's and after it the mean for that one
    assert row.nic_bytes == pytest.approx(2 * BYTES, rel=0.01)


def test_one_node_has_nothing_to_send_and_one_rank_calls_nobody():
    node = count(lazy("native"), 8, 8)
    assert (node.calls, node.messages, node.nic_bytes, node.least_nic_bytes) == (1, 14, 0, 0)
    rank = count(lazy("native"), 1, 1)
    assert (rank.calls, rank.messages, rank.smallest_message) == (0, 0, None)


def test_sparse_is_counted_past_its_ramp():
    sparse = count(SparseSync(chunk=4096), 16, 4)
    chunks = math.ceil(SMALL.elements / 4096)
    norms = 2 * 3 / 4 * 4 * chunks
    assert sparse.least_nic_bytes == pytest.approx(2 * 3 / 4 * 2 * 4096 * math.ceil(chunks / 8) + norms, rel=0.05)
    assert sparse.least_nic_bytes <= sparse.nic_bytes <= 1.05 * sparse.least_nic_bytes
    assert sparse.calls == 4 + 3  # the chunks as lazy does; the norms, in fp32, are added by the backend between nodes


def test_stated_link_bandwidth_and_latency():
    assert stated_link(64, 8, 56e9).s_per_byte == pytest.approx(2 * 63 / 64 / (0.9 * 7e9))
    assert stated_link(1, 8, 56e9).s_per_byte == 0
    latencies = [stated_link(nodes, 8, 56e9).latency_s for nodes in (1, 8, 64)]
    assert latencies[2] - latencies[1] == pytest.approx(latencies[1] - latencies[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "8,60"], "--ranks 60 is no whole number of nodes of --ranks-per-node 8"),
        (["--ranks", "0"], "--ranks 0 is not a list of whole numbers above 0"),
        (["--ranks", "many"], "--ranks many is not a list of whole numbers above 0"),
        (["--hosts", "4"], "--hosts measures a network, and --count does without one"),
        (["--rate", "1gbit"], "--rate measures a network, and --count does without one"),
        (["--link", "0gbit"], "'0gbit' is not a number with kbit, mbit or gbit"),
        (["--sync", "ddp"], "--sync ddp is torch's and its calls can't be counted"),
        (["--sync", "lazy,auto"], "--sync auto becomes one of the other engines"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_words(refusal: Callable[..., str], arguments: list[str], sentence: str):
    assert sentence in refusal("bench", "sync", "--count", *arguments)


def test_options_of_a_count_are_refused_without_it(refusal: Callable[..., str]):
    for option, value in (("--ranks", "8"), ("--ranks-per-node", "4"), ("--link", "10gbit")):
        assert f"{option} is for --count" in refusal("bench", "sync", option, value)
    none = CliRunner().invoke(app, ["bench", "sync", "--count", "--ranks-per-node", "0"])
    assert none.exit_code == 2
    assert "--ranks-per-node" in none.output


def test_layers_on_the_meta_device_are_updated_each_before_it_is_read():
    """None of them has a place in memory, by which they could be taken for tied ones."""
    assert count(HybridSync(fuse_mb=0), 8, 8).updates > 1
