"""What a network gives an all-reduce by its message's size: PyTorch's own, ours, MPI's, each in turn.

GradientFlow (arXiv 1902.06855) starts from the question why popular systems leave most of a network idle: short
messages do not fill it, and some collectives never do. Figures are those of nccl-tests (doc/PERFORMANCE.md): many
all-reduces between two readings of the clock, the slowest rank counts; algorithm bandwidth is bytes over seconds, and
bus bandwidth is 2 (n-1)/n of that for n ranks, what a ring would need of each rank's link.

A message is a tensor of the wire's dtype already: of the network a cast would say nothing. Ours send it as an engine
would, in pieces that take two lanes in turn, and divide the sum; the backend's own all-reduce is one call, and so is
MPI's, whose values are fp32 whatever the wire: it knows no bf16, so as many bytes are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

import psutil
import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from imagenet_fast.bench import mpi
from imagenet_fast.bench.hosts import TIMEOUT, on_gpus, run_on
from imagenet_fast.bench.netns import parse_rate, shaped_network
from imagenet_fast.bench.repetitions import time_repetitions
from imagenet_fast.cost_model.units import SIZE, UNITS, size_text
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.recipe.sync_config import Collective, Wire
from imagenet_fast.sync import wire_dtype
from imagenet_fast.sync.collectives import all_reduce, carry, piece_elements
from imagenet_fast.sync.collectives.comm_ops import lane_of
from imagenet_fast.sync.topology import Topology

Means = Collective | Literal["mpi"]
"""By which a message is averaged."""

_DTYPES: tuple[Wire, ...] = ("fp32", "bf16", "fp16")
_MOST_TIMES = 200  # all-reduces between two readings of the clock
_RANK_BYTES = 10 * 2**20  # of a forked rank's own, as in bench/engine_times
_MPI_RANK_BYTES = 60 * 2**20
_COPIES, _MPI_COPIES = 4, 2  # of a message that lie in a rank's memory at a time: by the parts of others that arrive


@dataclass(frozen=True)
class AllReduceTime:
    """All-reduces of one size by one collective: medians over the rounds; bandwidths in bytes a second."""

    collective: Means
    backend: Literal["gloo", "nccl", "mpi"]
    dtype: Wire
    bytes: int
    """Of the message on each rank: as asked for, and then as many as can be cut evenly."""
    hosts: int
    ranks_per_host: int
    rate: str | None
    latency_s: float
    latency_s_min: float
    latency_s_max: float
    times: int
    """All-reduces between two readings of the clock."""
    algorithm_bandwidth: float
    bus_bandwidth: float
    utilisation: float | None
    """The share of the link's rate that the bytes take up which must leave a host, 2 (H-1)/H of a message for H hosts.
    None without ``rate``, or where nothing has to."""
    kernel_bytes: float | None
    """That did leave a host, an all-reduce, by the counter of its link; None without ``rate``."""


@dataclass(frozen=True)
class Block:
    """A block of equal all-reduces on one rank."""

    latency_s: float
    kernel_bytes: float
    times: int


Blocks = dict[tuple[Means, int], list[Block]]
"""Of every collective and size (in bytes), by round."""


def bench_collectives(
    sizes: str,
    collectives: str | None,
    hosts: int,
    ranks_per_host: int,
    rate: str | None,
    wire: str,
    device: str | None,
    rounds: int,
    block_s: float,
) -> list[AllReduceTime]:
    """Time all-reduces of ``sizes`` by each of ``collectives`` (None: all that can be) over ``rounds`` rounds, in each
    of which each is repeated for about ``block_s``.

    Without a rate this machine is the only host, of all ranks; they have a GPU each, and NCCL, where ``device`` is
    "cuda", or None and there are as many. Raises UserError.
    """
    asked = parse_sizes(sizes)
    if wire not in _DTYPES:
        raise UserError(f"--wire {wire} is not one of {', '.join(_DTYPES)}; write one of these")
    ranks = hosts * ranks_per_host
    if ranks == 1:
        raise UserError("--hosts 1 with --ranks-per-host 1 is one rank, which has nobody to send to; raise one of them")
    if rate is not None and device == "cuda":
        raise UserError("--device cuda does not go with --rate: NCCL talks past its links; leave one out")
    gpus = on_gpus("cpu" if rate is not None and device is None else device, ranks)
    levels = rate is not None and min(hosts, ranks_per_host) > 1
    means = parse_collectives(collectives, levels, gpus)
    if rate is not None:
        _check_patience(max(asked), hosts, rate)
    if not gpus:
        _check_memory(max(asked), "mpi" in means, ranks)
    ranks_each = ranks if rate is None else ranks_per_host
    with (
        shaped_network(hosts, parse_rate(rate)) if rate is not None else nullcontext() as network,
        mpi.mpi_ranks(network, ranks_each) if "mpi" in means else nullcontext() as folder,
    ):
        by_rank: list[Blocks] = run_on(
            network, ranks_each, measure, asked, means, wire, rounds, block_s, gpus, rate is not None, folder, gpus=gpus
        )

    def row(collective: Means, size: int) -> AllReduceTime:
        blocks = [of_rank[collective, size] for of_rank in by_rank]
        slowest = [max(block.latency_s for block in of_round) for of_round in zip(*blocks, strict=True)]
        seconds = median(slowest)
        leaving = _leaving(size, hosts)
        return AllReduceTime(
            collective, "mpi" if collective == "mpi" else "nccl" if gpus else "gloo",
            "fp32" if collective == "mpi" else wire, size, hosts, ranks_per_host, rate,
            seconds, min(slowest), max(slowest), blocks[0][0].times,
            size / seconds, 2 * (ranks - 1) / ranks * size / seconds,
            leaving * 8 / parse_rate(rate) / seconds if rate is not None and leaving else None,
            median(fmean(block.kernel_bytes for block in of_round) for of_round in zip(*blocks, strict=True))
            if rate is not None else None,
        )  # fmt: skip

    return [row(*key) for key in by_rank[0]]


def parse_sizes(text: str) -> list[int]:
    """Bytes from a list of sizes and ranges: ``2KB..64MB`` doubles from 2 KiB on, ``2KB..64MB:4`` goes by fours; both
    ends are among them. K, M and G are powers of 1024, as in nccl-tests. Raises UserError."""
    sizes: set[int] = set()
    for part in text.upper().split(","):
        match = re.fullmatch(rf" *{SIZE}(?:\.\.{SIZE}(?::(\d{{1,9}}))?)? *", part, re.ASCII)
        first = int(match[1]) * UNITS[match[2]] if match else 0
        last = int(match[3]) * UNITS[match[4]] if match and match[3] else first
        step = int(match[5] or 2) if match else 2
        if first == 0 or step < 2:
            raise UserError(f"--sizes {text} is not a list of sizes above 0; write for example 4KB,2MB or 2KB..64MB:4")
        if first > last:
            raise UserError(f"--sizes {text} has a range that begins above its end; write the smaller size first")
        sizes.add(last)
        while first < last:
            sizes.add(first)
            first *= step
    return sorted(sizes)


def parse_collectives(text: str | None, levels: bool, gpus: bool) -> list[Means]:
    """The collectives of a list; None: all, but ``hierarchical`` without ``levels``, and MPI where it is not installed
    or values lie on GPUs. Raises UserError."""
    known = (*get_args(Collective), "mpi")
    lacking = mpi.lacking()
    if text is None:
        if lacking is not None and not gpus:
            warn(f"mpi is left out, since there is no {lacking}; {mpi.INSTALL} brings it")
        left_out = {"hierarchical"} if not levels else set()
        return [name for name in known if name not in left_out | ({"mpi"} if gpus or lacking is not None else set())]
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise UserError(f"--collectives {text}: there is no {name!r}; choose among {', '.join(known)}")
    if "hierarchical" in chosen and not levels:
        raise UserError(
            "--collectives hierarchical goes between hosts of several ranks; give it --rate, and at least 2 for both "
            "--hosts and --ranks-per-host"
        )
    if "mpi" in chosen and gpus:
        raise UserError("--collectives mpi sends from a processor's memory; add --device cpu, or leave mpi out")
    if "mpi" in chosen and lacking is not None:
        raise UserError(f"--collectives mpi: there is no {lacking}; {mpi.INSTALL}, or leave mpi out")
    return list(dict.fromkeys(chosen))  # type: ignore[arg-type]  # they are known


def _check_memory(size: int, by_mpi: bool, ranks: int) -> None:
    """Refuse messages, and more ranks, than there is memory for."""
    each = _RANK_BYTES + _COPIES * size + (_MPI_RANK_BYTES + _MPI_COPIES * size if by_mpi else 0)
    free = psutil.virtual_memory().available
    if ranks * each > free:
        raise UserError(
            f"--sizes up to {size_text(size)} between {ranks} ranks take {ranks * each / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} are free; ask for smaller messages, or fewer ranks"
        )


def _check_patience(size: int, hosts: int, rate: str) -> None:
    """Refuse messages for which gloo would not wait."""
    least_s = _leaving(size, hosts) * 8 / parse_rate(rate)
    if 4 * least_s > TIMEOUT.total_seconds():
        raise UserError(
            f"--sizes up to {size_text(size)} take at least {least_s:.0f} s an all-reduce at --rate {rate}; ask for "
            "smaller messages, or a faster link"
        )


def _leaving(size: int, hosts: int) -> float:
    """Bytes that must leave each of ``hosts`` before all have the sum of messages of ``size`` bytes."""
    return 2 * (hosts - 1) / hosts * size


def bandwidth_table(rows: Sequence[AllReduceTime]) -> Table:
    """One row a size and a collective; bandwidths in 10^6 bytes a second."""
    several = len({row.dtype for row in rows}) > 1
    table = compact_table(
        ("size", "collective"),
        ("ms", "spread", "alg MB/s", "bus MB/s", "of the link"),
        (
            (
                size_text(row.bytes) if before is None or before.bytes != row.bytes else "",
                f"{row.collective} {row.dtype}" if several and row.dtype != rows[0].dtype else row.collective,
                f"{1e3 * row.latency_s:.4g}", f"±{500 * (row.latency_s_max - row.latency_s_min):.2g}",
                f"{row.algorithm_bandwidth / 1e6:.4g}", f"{row.bus_bandwidth / 1e6:.4g}",
                number(row.utilisation, ".1%"),
            )
            for before, row in zip([None, *rows], rows, strict=False)
        ),
    )  # fmt: skip
    table.title = _title(rows[0])
    return table


def draw_bandwidth(rows: Sequence[AllReduceTime], figure: Any) -> None:
    """Over the size: how long an all-reduce takes, and how much of the link it uses, or its bus bandwidth."""
    latency, use = figure.subplots(1, 2)
    shared = all(row.utilisation is not None for row in rows)
    sizes = sorted({row.bytes for row in rows})
    for place, name in enumerate(dict.fromkeys(row.collective for row in rows)):
        own = [row for row in rows if row.collective == name]
        style = {"color": f"C{place}", "marker": "osD^vP*X"[place % 8], "markersize": 4, "linewidth": 1.4}
        style |= {"linestyle": "--" if name == "mpi" else ":" if name == "native" else "-"}
        label = {"mpi": "MPI", "native": f"{own[0].backend}'s own"}.get(name, name.replace("_", " "))
        at = [row.bytes for row in own]
        latency.plot(at, [1e3 * row.latency_s for row in own], label=label, **style)
        use.plot(
            at, [100 * (row.utilisation or 0) if shared else row.bus_bandwidth / 1e6 for row in own], **style
        )  # fmt: skip
    for axes in (latency, use):
        axes.set_xscale("log", base=2)
        ticks = sizes[:: -(-len(sizes) // 8)]
        axes.set_xticks(ticks, [size_text(size) for size in ticks], rotation=45, ha="right")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(xlabel="message")
        axes.spines[["top", "right"]].set_visible(False)
    latency.set_yscale("log")
    latency.set(ylabel="milliseconds an all-reduce")
    use.set(ylabel="% of the link's rate" if shared else "bus bandwidth, MB/s")
    use.set_ylim(0, max(100.0, use.get_ylim()[1]) if shared else None)
    figure.suptitle(_title(rows[0]), fontsize=9)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _title(row: AllReduceTime) -> str:
    ranks = f"{row.hosts * row.ranks_per_host} ranks"
    if row.rate is not None:
        ranks = f"{row.hosts} hosts" + (f" of {row.ranks_per_host} ranks" if row.ranks_per_host > 1 else "")
    link = row.rate or ("GPUs of one machine" if row.backend == "nccl" else "loopback")
    return f"all-reduces by message size: {ranks}, {link}, {row.dtype}"


def measure(
    sizes: Sequence[int],
    means: Sequence[Means],
    wire: Wire,
    rounds: int,
    block_s: float,
    gpus: bool,
    counted: bool = False,
    mpi_folder: Path | None = None,
) -> Blocks:
    """On each rank: all collectives in turn, size by size, ``rounds`` times. How often each is repeated within
    ``block_s`` follows from a first time, and is the same on all ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    topology, dtype = Topology(device), wire_dtype(wire)
    lengths = list(dict.fromkeys(topology.padded(-(-size // dtype.itemsize)) for size in sizes))
    message = torch.empty(lengths[-1], dtype=dtype, device=device)
    line = mpi.call(mpi_folder, dist.get_rank()) if mpi_folder is not None else None

    def block(name: Means, elements: int, times: int, checked: bool = False) -> Block:
        part = message[:elements]
        if name == "mpi":
            assert line is not None
            line.send((-(-part.nbytes // 4), times, checked))
            latency_s, kernel_bytes = line.recv()
        else:
            once = _all_reduces(name, part, topology)
            if checked:
                _check(once, part.fill_(1), topology.size if name == "native" else 1)
            part.zero_()  # of which sums stay finite
            latency_s, kernel_bytes = time_repetitions(
                once, times, dist.barrier, torch.cuda.synchronize if gpus else None, counted
            )
        return Block(latency_s, kernel_bytes, times)

    often: dict[tuple[Means, int], int] = {}
    for elements in lengths:
        for name in means:
            first = torch.tensor(block(name, elements, 1, checked=True).latency_s, device=device)
            dist.all_reduce(first, dist.ReduceOp.MAX)
            often[name, elements] = min(_MOST_TIMES, max(1, math.ceil(block_s / float(first))))
    blocks: Blocks = {(name, elements * dtype.itemsize): [] for elements in lengths for name in means}
    for turn in range(rounds):
        begin = turn % len(means)
        for elements in lengths:
            for name in [*means[begin:], *means[:begin]]:
                times = often[name, elements]
                blocks[name, elements * dtype.itemsize].append(block(name, elements, times))
    topology.close()
    return blocks


def _all_reduces(collective: Collective, values: Tensor, topology: Topology) -> Callable[[], object]:
    """What averages ``values`` whenever it is called; the backend's own leaves their sum."""
    if collective == "native":
        return partial(dist.all_reduce, values)
    pieces = [
        all_reduce(piece, values.dtype, collective, topology, lane=lane_of(number, topology.device))
        for number, piece in enumerate(values.split(piece_elements(values.dtype, topology)))
    ]

    def once() -> None:
        for transfer in [carry(phases) for phases in pieces]:
            transfer.wait()

    return once


def _check(once: Callable[[], object], ones: Tensor, expected: int) -> None:
    """A collective that is wrong would be fast for nothing."""
    once()
    assert torch.allclose(ones, torch.full_like(ones, expected), rtol=0.02), "an all-reduce has come out wrong"
