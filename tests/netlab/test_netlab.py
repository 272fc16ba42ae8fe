"""The network of one's own, its ranks, and what benchmarks measure over it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import psutil
import pytest

from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.cost_model.layer_profile import save_profile
from imagenet_fast.metrics.tables import table
from imagenet_fast.netlab.namespaces import parse_rate, shaped_network
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.recipe.load import parse_engines
from tests.bench.small import SMALL, benched
from tests.conftest import refusal_of
from tests.e2e.command import COMMAND, environment, wait_for

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("root")]

GBIT = parse_rate("1gbit")


def namespaces(processes: Iterable[int] | None = None, held: bool = True) -> set[str]:
    """The network namespaces that some of the processes is in or, if ``held``, holds open; None: all of this node."""
    found = set()
    pids = ["[0-9]*"] if processes is None else processes
    places = [f"{pid}/{place}" for pid in pids for place in (("ns/net", "fd/*") if held else ("ns/net",))]
    for link in chain(*(Path("/proc").glob(place) for place in places)):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("net:"):
            found.add(target)
    return found


def test_nothing_is_left_of_a_network():
    before = namespaces([os.getpid()])
    with shaped_network(3, GBIT) as hosts:
        made = namespaces([os.getpid()]) - before
        assert (len(made), len({host.address for host in hosts})) == (4, 3)
    assert not made & namespaces()


def test_a_rate_is_read_in_tcs_notation():
    rates = {"250mbit": 250_000_000, "1.5gbit": 1_500_000_000, "8kbit": 8000}
    assert {text: parse_rate(text) for text in rates} == rates
    for wrong in ("-1gbit", "0mbit", "1.gbit", "1,5gbit", "1e3mbit", "1 gbit", "10gb", "gbit", ""):
        assert "is not a number with kbit, mbit or gbit" in refusal_of(parse_rate, wrong)


def test_every_engine_has_a_row_and_the_kernel_counts_what_it_counts(tmp_path: Path):
    words = (
        "sync --model small.json --nodes 3 --rate 1gbit --rounds 2 --steps 1 "
        "--sync ddp:fp32,allreduce,ring,lazy,hybrid,dear,sparse,auto "
        "--set sparse.dense_epochs=0 --set sparse.ramp_epochs=0 --set sparse.chunk=4096 --trace"
    )
    rows, printed = benched(tmp_path, words, str(tmp_path / "trace"))
    assert json.loads((tmp_path / "trace" / "hybrid-bf16.json").read_text())["traceEvents"]
    assert "small, 3 nodes, 1gbit" in printed
    ours = ("allreduce", "ring", "lazy", "hybrid", "dear", "sparse", "auto")
    assert [(row["engine"], row["wire"]) for row in rows] == [
        ("ddp", "fp32"), *((engine, "bf16") for engine in ours), ("ddp", "bf16")
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert row["compute_s"] >= SMALL.compute_s
        assert row["launches"] >= 1
    large = [row for row in rows if row["sent_bytes"] > 1e5]  # beside which acknowledgements weigh little
    assert len(large) >= 5
    for row in large:
        assert row["kernel_bytes"] == pytest.approx(row["sent_bytes"], rel=0.1), row["engine"]


def test_bytes_of_hosts_of_several_ranks_are_a_hosts():
    row, _ = rows = bench_sync(SMALL, parse_engines("ring", "bf16"), Lab(2, 2, "1gbit"), scale=1, rounds=1, steps=1)
    assert (row.hosts, row.ranks_per_host) == (2, 2)
    assert "2 nodes of 2 ranks" in str(table(rows).title)
    each = 2 * (4 - 1) / 4 * 2 * SMALL.elements  # of an all-reduce of 16-bit values between four ranks
    assert row.sent_bytes == pytest.approx(2 * each, rel=0.05)
    assert 0.25 * row.sent_bytes < row.kernel_bytes < 0.75 * row.sent_bytes  # the rest stays within a host


SHAPED = "--sizes 4KB,1MB --nodes 2 --nproc 2 --rate 1gbit --rounds 1 --seconds 0.1"
"""Two hosts of two ranks."""


def test_a_collective_and_size_has_nccl_tests_figures(tmp_path: Path):
    rows, printed = benched(tmp_path, f"collectives --wire bf16 --collectives native,hierarchical {SHAPED}")
    assert [(row["bytes"], row["collective"], row["backend"], row["dtype"]) for row in rows] == [
        (size, kind, "gloo", "bf16") for size in (2**12, 2**20) for kind in ("native", "hierarchical")
    ]
    for row in rows:
        assert 0 < row["latency_s_min"] <= row["latency_s"] <= row["latency_s_max"]
        assert row["times"] >= 1
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["latency_s"])
        assert row["bus_bandwidth"] == pytest.approx(2 * 3 / 4 * row["algorithm_bandwidth"])
        assert row["utilisation"] == pytest.approx(row["bytes"] * 8 / 1e9 / row["latency_s"])  # 2 (H-1)/H is 1
    assert "2 nodes of 2 ranks, 1gbit" in printed
    sent = {row["collective"]: row["kernel_bytes"] for row in rows if row["bytes"] == 2**20}
    assert sent["native"] > 1.4 * 2**20, "a ring of four, which knows no hosts"
    assert sent["hierarchical"] == pytest.approx(2**20, rel=0.05), "the least: nothing within a host"


@pytest.mark.weekly
def test_several_run_at_once_and_an_end_by_force_leaves_nothing(tmp_path: Path):
    before = namespaces([os.getpid()])
    save_profile(SMALL, tmp_path / "small.json")
    words = "bench sync --model small.json --rate 100mbit --nodes 2 --rounds 999"
    command = [*COMMAND, *words.split()]
    ends, silent = (signal.SIGINT, signal.SIGKILL), subprocess.PIPE
    both = [subprocess.Popen(command, stdout=silent, stderr=silent, env=environment(), cwd=tmp_path) for _ in ends]

    def family() -> list[int]:
        trees = [psutil.Process(process.pid) for process in both]
        return [child.pid for tree in trees for child in (tree, *tree.children(recursive=True))]

    try:
        wait_for(lambda: len(namespaces(family(), held=False) - before) == 4, timeout_s=60)  # each has a rank in it
        theirs = namespaces(family()) - before
        assert len(theirs) == 6
        for process, end in zip(both, ends, strict=True):
            process.send_signal(end)
        for process in both:
            assert process.communicate(timeout=20)[1] == b""
        wait_for(lambda: not theirs & namespaces(), timeout_s=10)
    finally:
        for process in both:
            process.kill()
