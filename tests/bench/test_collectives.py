"""All-reduces by message size: gloo's own, ours and MPI's, over a shaped network and between ranks of one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from imagenet_fast.bench import mpi
from imagenet_fast.bench.collectives import bench_collectives, parse_collectives, parse_sizes
from imagenet_fast.bench.figures import draw_bandwidth
from imagenet_fast.bench.netns import inhabit, parse_rate, shaped_network
from imagenet_fast.bench.tables import bandwidth_table
from imagenet_fast.cost_model.units import size_text
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.plots import new_figure
from tests.e2e.command import COMMAND, environment, imagenet_fast, in_process, wait_for


@pytest.fixture(scope="module")
def with_mpi() -> None:
    """Skips where MPI is not installed; in CI, where the extra `test` has brought it, that is a failure."""
    if (missing := mpi.lacking()) is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"there is no {missing}")
    pytest.skip(f"there is no {missing}")


SHAPED = (
    "bench", "collectives", "--sizes", "4KB,1MB", "--collectives", "native,hierarchical,mpi", "--hosts", "2",
    "--ranks-per-host", "2", "--rate", "1gbit", "--wire", "bf16", "--rounds", "1", "--seconds", "0.1",
)  # fmt: skip
"""Two hosts of two ranks."""


@pytest.fixture(scope="module")
def shaped(root: None, with_mpi: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    folder = tmp_path_factory.mktemp("bandwidth")
    printed = in_process(*SHAPED, "--json", str(folder / "rows.json"), "--png", str(folder / "rows.png"))
    assert (folder / "rows.png").stat().st_size > 10_000
    return json.loads((folder / "rows.json").read_text()), printed


def test_there_is_a_row_a_size_and_collective_with_nccl_tests_figures(shaped: tuple[list[dict[str, Any]], str]):
    rows, printed = shaped
    assert [(row["bytes"], row["collective"], row["backend"], row["dtype"]) for row in rows] == [
        (size, *kind)
        for size in (2**12, 2**20)
        for kind in (("native", "gloo", "bf16"), ("hierarchical", "gloo", "bf16"), ("mpi", "mpi", "fp32"))
    ]
    for row in rows:
        assert 0 < row["latency_s_min"] <= row["latency_s"] <= row["latency_s_max"]
        assert row["times"] >= 1
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["latency_s"])
        assert row["bus_bandwidth"] == pytest.approx(2 * 3 / 4 * row["algorithm_bandwidth"])
        assert row["utilisation"] == pytest.approx(row["bytes"] * 8 / 1e9 / row["latency_s"])  # 2 (H-1)/H is 1
    assert "2 hosts of 2 ranks, 1gbit, bf16" in printed
    assert "mpi fp32" in printed
    assert all(len(line) <= 80 for line in printed.splitlines()), printed


def test_link_carries_least_bytes_when_hierarchical(shaped: tuple[list[dict[str, Any]], str]):
    native, levels, by_mpi = (row["kernel_bytes"] for row in shaped[0] if row["bytes"] == 2**20)
    assert levels == pytest.approx(2**20, rel=0.05)
    assert native > 1.4 * 2**20  # a ring of four, which knows no hosts
    assert by_mpi > 2**20


def test_three_ranks_of_one_machine_take_part_in_all_that_can_be():
    rows = bench_collectives("1,2", None, 3, 1, None, "fp16", "cpu", rounds=1, block_s=0.02)
    assert {row.collective for row in rows} == set(parse_collectives(None, levels=False, gpus=False))
    assert {row.bytes for row in rows} == {3 * 2}, "a message has a part for each rank"
    assert len(rows) == len({row.collective for row in rows})
    assert all(row.utilisation is None and row.kernel_bytes is None for row in rows)
    table, figure = bandwidth_table(rows), new_figure(Path("x.png"), 11, 5)
    assert "3 ranks, loopback, fp16" in str(table.title)
    assert str(next(iter(table.columns[0].cells))) == "6 B"
    draw_bandwidth(rows, figure)
    assert figure.axes[1].get_ylabel() == "bus bandwidth, MB/s"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2KB", [2048]),
        ("2k..16KiB", [2048, 4096, 8192, 16384]),
        ("2KB..64KB:4", [2048, 8192, 32768, 65536]),
        ("1MB, 7,7b,3..11", [3, 6, 7, 11, 2**20]),
        ("5..5", [5]),
    ],
)
def test_sizes_are_a_list_of_ranges_with_both_ends(text: str, sizes: list[int]):
    assert parse_sizes(text) == sizes


def test_a_size_is_written_as_it_is_read():
    assert [size_text(size) for size in (6, 2048, 2052, 3 * 2**20)] == ["6 B", "2 KB", "2.004 KB", "3 MB"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sizes", "0"), "--sizes 0 is not a list of sizes above 0"),
        (("--sizes", "x"), "--sizes x is not a list of sizes"),
        (("--sizes", ""), "is not a list of sizes"),
        (("--sizes", "²KB"), "is not a list of sizes"),
        (("--sizes", "2KB..8KB:1"), "is not a list of sizes"),
        (("--sizes", "2KB..8KB..9KB"), "is not a list of sizes"),
        (("--sizes", "4MB..2KB"), "--sizes 4MB..2KB has a range that begins above its end"),
        (("--sizes", "900GB"), "GiB of memory"),
        (("--sizes", "1GB", "--rate", "1mbit"), "take at least"),
        (("--collectives", "ring,rign"), "there is no 'rign'; choose among native, ring"),
        (("--collectives", "hierarchical"), "goes between hosts of several ranks"),
        (("--collectives", "hierarchical", "--rate", "1gbit"), "goes between hosts of several ranks"),
        (("--hosts", "1"), "nobody to send to"),
        (("--rate", "fast"), "such as 250mbit"),
        (("--wire", "int8"), "--wire int8 is not one of fp32, bf16, fp16"),
        (("--device", "tpu"), "neither cpu nor cuda"),
        (("--device", "cuda", "--hosts", "999"), "GPUs for 999 ranks"),
        (("--device", "cuda", "--rate", "1gbit"), "--device cuda does not go with --rate"),
    ],
)
def test_what_cannot_be_measured_is_refused(refusal: Callable[..., str], options: tuple[str, ...], said: str):
    assert said in refusal("bench", "collectives", "--collectives", "ring", *options)


def test_mpi_that_is_not_installed_is_refused_by_name_and_else_left_out(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    said = refusal("bench", "collectives", "--collectives", "ring,mpi")
    assert "there is no mpi4py; `pip install mpi4py mpich`" in said
    assert "mpi" not in parse_collectives(None, levels=False, gpus=False)
    assert "mpi is left out, since there is no mpi4py" in capsys.readouterr().err


def test_mpi_is_not_asked_to_send_from_a_gpu(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match="add --device cpu, or leave mpi out"):
        parse_collectives("mpi", levels=False, gpus=True)
    assert "mpi" not in parse_collectives(None, levels=False, gpus=True)
    assert not capsys.readouterr().err


def test_mpi_past_the_links_is_refused(root: None, with_mpi: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "_BY_LINK", {})
    with (
        pytest.raises(UserError, match="carry 0 of the 65536 bytes that an MPI rank has to send"),
        shaped_network(2, parse_rate("1gbit")) as hosts,
        mpi.mpi_ranks(hosts, 1),
    ):
        pass


def test_mpi_that_does_not_start_says_why(root: None, with_mpi: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(mpi._BY_LINK, "UCX_NET_DEVICES", "eth7")
    with (
        pytest.raises(UserError, match=r"MPI's ranks have ended with .*(No such device|'eth7\\' is not available)"),
        shaped_network(2, parse_rate("1gbit")) as hosts,
        mpi.mpi_ranks(hosts, 1),
    ):
        pass


def test_who_inhabits_a_host_sees_its_interfaces_alone(root: None):
    """As UCX must, on a node that calls its own by other names."""

    def interfaces() -> set[str]:
        return {path.name for path in Path("/sys/class/net").iterdir()}

    with shaped_network(1, parse_rate("1gbit")) as (host,), ThreadPoolExecutor(1) as thread:
        before = interfaces()
        thread.submit(inhabit, host).result()
        assert thread.submit(interfaces).result() == {"lo", "eth0"}
        assert interfaces() == before


@pytest.mark.weekly
def test_neither_its_ranks_nor_those_of_mpi_say_anything_beside(root: None, with_mpi: None):
    done = imagenet_fast(*SHAPED)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.weekly
def test_an_end_by_force_leaves_no_rank_of_mpi(root: None, with_mpi: None):
    command = [*COMMAND, "bench", "collectives", "--sizes", "1MB", "--collectives", "mpi", "--hosts", "2"]
    process = subprocess.Popen([*command, "--rate", "10mbit", "--rounds", "999"], env=environment())

    def ranks() -> list[psutil.Process]:
        below = psutil.Process(process.pid).children(recursive=True)
        living = [child for child in below if child.status() != psutil.STATUS_ZOMBIE]
        return [rank for rank in living if rank.cmdline()[1:3] == ["-m", "imagenet_fast.bench.mpi"]]

    def both_are_there() -> bool:
        try:
            return len(ranks()) == 2
        except psutil.Error:  # one of those in between has just ended
            return False

    try:
        wait_for(both_are_there)
        left = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left), timeout_s=10)
