"""The network of one's own and the benchmark on it, small and fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.bench.hosts import run_on
from imagenet_fast.bench.netns import parse_rate, sent_bytes, shaped_network
from imagenet_fast.bench.tables import sync_table
from imagenet_fast.cli.main import app
from imagenet_fast.cost_model.layer_profile import save_profile
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.load import parse_engines
from tests.bench.small import SMALL
from tests.e2e.command import in_process, wait_for


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


@pytest.fixture(scope="module")
def rows(root: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("bench")
    save_profile(SMALL, folder / "small.json")
    printed = in_process(
        "bench", "sync", "--model", str(folder / "small.json"), "--hosts", "3", "--rate", "1gbit", "--rounds", "2",
        "--steps", "1",
        "--sync", "ddp:fp32,allreduce,ring,lazy,hybrid,dear,sparse,auto", "--set", "sparse.dense_epochs=0",
        "--set", "sparse.ramp_epochs=0", "--set", "sparse.chunk=4096",
        "--json", str(folder / "rows.json"), "--png", str(folder / "rows.png"), "--trace", str(folder / "trace"),
    )  # fmt: skip
    assert "3 hosts, 1gbit, bf16" in printed
    assert all(len(line) <= 80 for line in printed.splitlines()), printed
    assert (folder / "rows.png").stat().st_size > 10_000
    assert json.loads((folder / "trace" / "hybrid-bf16.json").read_text())["traceEvents"]
    table: list[dict[str, object]] = json.loads((folder / "rows.json").read_text())
    return table


def test_there_is_a_row_an_engine_with_every_figure(rows: list[dict[str, object]]):
    engines = [(row["engine"], row["wire"]) for row in rows]
    assert engines == [
        ("ddp", "fp32"), ("allreduce", "bf16"), ("ring", "bf16"), ("lazy", "bf16"), ("hybrid", "bf16"),
        ("dear", "bf16"), ("sparse", "bf16"), ("auto", "bf16"), ("ddp", "bf16"),
    ]  # fmt: skip
    asked = {
        "engine", "wire", "hosts", "ranks_per_host", "rate", "scale", "model", "step_s", "step_s_min", "step_s_max",
        "compute_s", "exposed_s", "raw_s", "sent_bytes", "kernel_bytes", "launches", "ratio_to_ddp", "ratio_to_limit",
    }  # fmt: skip
    for row in rows:
        assert asked <= set(row)
        assert 0 < row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert row["compute_s"] >= SMALL.compute_s
        assert row["launches"] >= 1


def test_the_kernel_counts_what_the_engines_count(rows: list[dict[str, object]]):
    large = [row for row in rows if row["sent_bytes"] > 1e5]  # beside which acknowledgements and barriers weigh little
    assert len(large) >= 5
    for row in large:
        assert row["kernel_bytes"] == pytest.approx(row["sent_bytes"], rel=0.1), row["engine"]


def told_and_counted() -> tuple[list[str], int, int]:
    """A rank's place by its environment; what its link carries while it talks to its host's other rank, and while to
    one elsewhere."""
    asked = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    rank, message = dist.get_rank(), torch.ones(10**6)
    counts = [sent_bytes()]
    for distance in (1, 2):
        dist.barrier()
        received = torch.empty_like(message)
        transfers = [dist.isend(message, rank ^ distance), dist.irecv(received, rank ^ distance)]
        for transfer in transfers:
            assert transfer is not None
            transfer.wait()
        dist.barrier()
        counts.append(sent_bytes())
    return [os.environ[key] for key in asked], counts[1] - counts[0], counts[2] - counts[1]


def test_ranks_of_one_host_know_it_and_talk_past_its_link(root: None):
    with shaped_network(2, parse_rate("1gbit")) as hosts:
        ranks = run_on(hosts, 2, told_and_counted)
    assert [place for place, _, _ in ranks] == [
        ["0", "4", "0", "2", "0"], ["1", "4", "1", "2", "0"], ["2", "4", "0", "2", "1"], ["3", "4", "1", "2", "1"],
    ]  # fmt: skip
    for _, inside, between in ranks:
        assert inside < 20_000  # barriers
        assert between > 2 * 4e6  # its own and its neighbour's


def test_bytes_of_hosts_of_several_ranks_are_a_hosts(root: None):
    row, _ = rows = bench_sync(SMALL, parse_engines("ring", "bf16"), 2, 2, "1gbit", scale=1, rounds=1, steps=1)
    assert (row.hosts, row.ranks_per_host) == (2, 2)
    assert "2 hosts of 2 ranks" in str(sync_table(rows).title)
    each = 2 * (4 - 1) / 4 * 2 * SMALL.elements  # of an all-reduce of 16-bit values between four ranks
    assert row.sent_bytes == pytest.approx(2 * each, rel=0.05)
    assert row.kernel_bytes is not None
    assert 0.25 * row.sent_bytes < row.kernel_bytes < 0.75 * row.sent_bytes  # the rest stays within a host


def test_too_many_or_no_ranks_are_refused(refusal: Callable[..., str]):
    said = refusal("bench", "sync", "--hosts", "1000", "--ranks-per-host", "1000")
    assert "--hosts 1000 with --ranks-per-host 1000 is 1000000 processes, which take more than" in said
    assert "ask for fewer" in said
    none = CliRunner().invoke(app, ["bench", "sync", "--ranks-per-host", "0"])
    assert none.exit_code == 2
    assert "--ranks-per-host" in none.output


def test_nothing_is_left_of_a_network(rows: list[dict[str, object]]):
    before = namespaces([os.getpid()])
    with shaped_network(3, parse_rate("1gbit")) as hosts:
        made = namespaces([os.getpid()]) - before
        assert len(made) == 4
        assert len({host.address for host in hosts}) == 3
    assert not made & namespaces()


@pytest.mark.weekly
def test_several_run_at_once_and_an_end_by_force_leaves_nothing(root: None, tmp_path: Path):
    before = namespaces([os.getpid()])
    save_profile(SMALL, tmp_path / "small.json")
    command = [sys.executable, "-m", "imagenet_fast", "bench", "sync", "--model", str(tmp_path / "small.json")]
    command += ["--hosts", "2", "--rate", "100mbit", "--rounds", "999"]
    ends = [signal.SIGINT, signal.SIGKILL]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in ends]

    def family() -> list[int]:
        return [one.pid for process in both for one in psutil.Process(process.pid).children(True)] + [
            process.pid for process in both
        ]

    try:
        wait_for(lambda: len(namespaces(family(), held=False) - before) == 4, timeout_s=60)  # each has a rank in it
        theirs = namespaces(family()) - before
        assert len(theirs) == 6
        for process, end in zip(both, ends, strict=True):
            process.send_signal(end)
        for process in both:
            _, errors = process.communicate(timeout=20)
            assert errors == b""
        wait_for(lambda: not theirs & namespaces(), timeout_s=10)
    finally:
        for process in both:
            process.kill()


def test_unwritable_output_file_is_refused_first(refusal: Callable[..., str]):
    for option in ("--json", "--png"):
        said = refusal("bench", "sync", option, "/nowhere/rows")
        assert f"{option} /nowhere/rows: there is no directory /nowhere" in said


def test_rates_are_as_tc_writes_them():
    assert parse_rate("250mbit") == 250_000_000
    assert parse_rate("1.5gbit") == 1_500_000_000
    for wrong in ("250", "fast", "0mbit", "-1gbit"):
        with pytest.raises(UserError, match="such as 250mbit"):
            parse_rate(wrong)
