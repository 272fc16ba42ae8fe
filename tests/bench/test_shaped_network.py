"""The network of one's own, and what `bench sync` and `bench collectives` measure over it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from imagenet_fast.bench import mpi
from imagenet_fast.bench.engines import bench_sync
from imagenet_fast.bench.hosts import run_on
from imagenet_fast.bench.netns import inhabit, parse_rate, sent_bytes, shaped_network
from imagenet_fast.bench.tables import sync_table
from imagenet_fast.cost_model.layer_profile import save_profile
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.load import parse_engines
from tests.bench.small import SMALL, Rows, benched
from tests.e2e.command import COMMAND, environment, imagenet_fast, wait_for

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("root")]

GBIT = parse_rate("1gbit")


@pytest.fixture(scope="module")
def with_mpi() -> None:
    """Skips where MPI is not installed; in CI, where the extra `test` has brought it, that is a failure."""
    if (missing := mpi.lacking()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"there is no {missing}")


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
        assert len(made) == 4
        assert len({host.address for host in hosts}) == 3
    assert not made & namespaces()


def test_who_inhabits_a_host_sees_its_interfaces_alone():
    """As UCX must, on a node that calls its own by other names."""

    def interfaces() -> set[str]:
        return {path.name for path in Path("/sys/class/net").iterdir()}

    with shaped_network(1, GBIT) as (host,), ThreadPoolExecutor(1) as thread:
        before = interfaces()
        thread.submit(inhabit, host).result()
        assert thread.submit(interfaces).result() == {"lo", "eth0"}
        assert interfaces() == before


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


def test_ranks_of_one_host_know_it_and_talk_past_its_link():
    with shaped_network(2, GBIT) as hosts:
        ranks = run_on(hosts, 2, told_and_counted)
    assert ["".join(place) for place, _, _ in ranks] == ["04020", "14120", "24021", "34121"]
    for _, inside, between in ranks:
        assert inside < 20_000  # barriers
        assert between > 2 * 4e6  # its own and its neighbour's


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("sync")
    words = (
        "sync --model small.json --hosts 3 --rate 1gbit --rounds 2 --steps 1 "
        "--sync ddp:fp32,allreduce,ring,lazy,hybrid,dear,sparse,auto "
        "--set sparse.dense_epochs=0 --set sparse.ramp_epochs=0 --set sparse.chunk=4096 --trace"
    )
    measured = benched(folder, words, str(folder / "trace"))
    assert json.loads((folder / "trace" / "hybrid-bf16.json").read_text())["traceEvents"]
    return measured


def test_every_engine_has_a_row_with_every_figure(engines: Rows):
    rows, printed = engines
    assert "3 hosts, 1gbit, bf16" in printed
    assert [(row["engine"], row["wire"]) for row in rows] == [
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


def test_the_kernel_counts_what_the_engines_count(engines: Rows):
    large = [row for row in engines[0] if row["sent_bytes"] > 1e5]  # beside which acknowledgements weigh little
    assert len(large) >= 5
    for row in large:
        assert row["kernel_bytes"] == pytest.approx(row["sent_bytes"], rel=0.1), row["engine"]


def test_bytes_of_hosts_of_several_ranks_are_a_hosts():
    row, _ = rows = bench_sync(SMALL, parse_engines("ring", "bf16"), 2, 2, "1gbit", scale=1, rounds=1, steps=1)
    assert (row.hosts, row.ranks_per_host) == (2, 2)
    assert "2 hosts of 2 ranks" in str(sync_table(rows).title)
    each = 2 * (4 - 1) / 4 * 2 * SMALL.elements  # of an all-reduce of 16-bit values between four ranks
    assert row.sent_bytes == pytest.approx(2 * each, rel=0.05)
    assert row.kernel_bytes is not None
    assert 0.25 * row.sent_bytes < row.kernel_bytes < 0.75 * row.sent_bytes  # the rest stays within a host


SHAPED = (
    "collectives --sizes 4KB,1MB --collectives native,hierarchical,mpi --hosts 2 --ranks-per-host 2 --rate 1gbit "
    "--wire bf16 --rounds 1 --seconds 0.1"
)
"""Two hosts of two ranks."""


def test_a_collective_and_size_has_nccl_tests_figures(with_mpi: None, tmp_path: Path):
    rows, printed = benched(tmp_path, SHAPED)
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
    native, levels, by_mpi = (row["kernel_bytes"] for row in rows if row["bytes"] == 2**20)
    assert levels == pytest.approx(2**20, rel=0.05), "hierarchical sends the least"
    assert native > 1.4 * 2**20, "a ring of four, which knows no hosts"
    assert by_mpi > 2**20


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"UCX_NET_DEVICES": "eth7"}, r"MPI's ranks have ended with .*(No such device|'eth7\\' is not available)"),
        ({}, "carry 0 of the 65536 bytes that an MPI rank has to send"),
    ],
    ids=["does not start", "goes past the links"],
)
def test_mpi_says_why_it(changes: dict[str, str], sentence: str, with_mpi: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "_BY_LINK", mpi._BY_LINK | changes if changes else {})
    with pytest.raises(UserError, match=sentence), shaped_network(2, GBIT) as hosts, mpi.mpi_ranks(hosts, 1):
        pass


@pytest.mark.weekly
def test_neither_its_ranks_nor_those_of_mpi_say_anything_beside(with_mpi: None):
    done = imagenet_fast("bench", *SHAPED.split())
    assert (done.returncode, done.stderr) == (0, "")


def living(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if not is_over(child)]


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.weekly
def test_an_end_by_force_leaves_no_rank_of_mpi(with_mpi: None):
    words = ("--sizes", "1MB", "--collectives", "mpi", "--hosts", "2", "--rate", "10mbit", "--rounds", "999")
    process = subprocess.Popen([*COMMAND, "bench", "collectives", *words], env=environment())

    def both_are_there() -> bool:
        try:
            return [child.cmdline()[1:3] for child in living(process)].count(["-m", "imagenet_fast.bench.mpi"]) == 2
        except psutil.Error:  # one of those in between has just ended
            return False

    try:
        wait_for(both_are_there)
        left = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: all(map(is_over, left)), timeout_s=10)


@pytest.mark.weekly
def test_several_run_at_once_and_an_end_by_force_leaves_nothing(tmp_path: Path):
    before = namespaces([os.getpid()])
    save_profile(SMALL, tmp_path / "small.json")
    words = ("--model", str(tmp_path / "small.json"), "--hosts", "2", "--rate", "100mbit", "--rounds", "999")
    ends = [signal.SIGINT, signal.SIGKILL]
    command, silent = [*COMMAND, "bench", "sync", *words], subprocess.PIPE
    both = [subprocess.Popen(command, stdout=silent, stderr=silent, env=environment()) for _ in ends]

    def family() -> list[int]:
        return [child.pid for process in both for child in (psutil.Process(process.pid), *living(process))]

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
