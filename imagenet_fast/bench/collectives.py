"""Measure all-reduce bandwidth by message size, for PyTorch's own all-reduce, our collectives and MPI.

GradientFlow (arXiv 1902.06855) asks why popular systems leave most of a network idle: short messages do not fill it,
and some collectives never do. Metrics are those of nccl-tests (doc/PERFORMANCE.md). Many all-reduces run between two
clock readings, and the slowest rank counts. Algorithm bandwidth is bytes over seconds. Bus bandwidth is 2 (n-1)/n of
that for n ranks: what a ring would need of each rank's link.

A message already has the wire dtype, because a cast says nothing about the network. Our collectives send it as an
engine would, in pieces that alternate between two lanes, and divide the sum. The backend's own all-reduce is one call,
and so is MPI's. MPI has no bf16, so it sends fp32 values of the same number of bytes, whatever the wire dtype.
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
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.bench import mpi
from imagenet_fast.bench.forks import report_progress
from imagenet_fast.bench.hosts import TIMEOUT, on_gpus, run_on
from imagenet_fast.bench.netns import fill_unevenly, parse_rate, shaped_network, time_repetitions
from imagenet_fast.cost_model.collectives import piece_elements
from imagenet_fast.distributed.cores import usable_memory
from imagenet_fast.errors import UserError, listed, warn
from imagenet_fast.recipe.engine_table import Collective, Wire
from imagenet_fast.sync.all_reduce import format_of
from imagenet_fast.sync.factory import wire_dtype
from imagenet_fast.sync.network_benchmark import all_reduces
from imagenet_fast.sync.topology import Topology
from imagenet_fast.units import SIZE, UNITS, geometric_range, size_text

Means = Collective | Literal["mpi"]
"""The collective that averages a message."""

_DTYPES: tuple[Wire, ...] = ("fp32", "bf16", "fp16")
_MOST_TIMES = 200  # maximum number of all-reduces between two clock readings
_RANK_BYTES = 10 * 2**20  # memory of a forked rank itself, as in bench/engines.py
_MPI_RANK_BYTES = 60 * 2**20
_COPIES, _MPI_COPIES = 4, 3  # copies of a message in a rank's memory at once, with parts received from others


@dataclass(frozen=True)
class AllReduceTime:
    """All-reduces of one size by one collective: medians over the rounds.

    Bandwidths are in bytes per second.
    """

    collective: Means
    """All-reduce algorithm, or the backend that has its own."""
    backend: Literal["gloo", "nccl", "mpi"]
    """What sends the bytes."""
    dtype: Wire
    """Dtype on the wire."""
    bytes: int
    """Message size on each rank: the requested size, rounded up so that it can be cut evenly."""
    hosts: int
    """Number of nodes."""
    ranks_per_host: int
    """Ranks on each node."""
    rate: str | None
    """Rate of each node's link, as given; None: the loopback interface."""
    latency_s: float
    """Time of one all-reduce."""
    latency_s_min: float
    """That of the fastest round."""
    latency_s_max: float
    """That of the slowest round."""
    times: int
    """Number of all-reduces between two clock readings."""
    algorithm_bandwidth: float
    """Bytes of the message over its time, in bytes a second."""
    bus_bandwidth: float
    """The same times 2 (n - 1) / n for n ranks, which a ring's link carries, in bytes a second."""
    utilisation: float | None
    """Share of the link's rate used by the bytes that must leave a node: 2 (H-1)/H of a message for H nodes.

    None without ``rate``, or if no bytes must leave a node.
    """
    kernel_bytes: float | None
    """Bytes per all-reduce that did leave a node, by its link's counter; None without ``rate``."""


@dataclass(frozen=True)
class Block:
    """A block of equal all-reduces on one rank."""

    latency_s: float
    kernel_bytes: float
    times: int


Blocks = dict[tuple[Means, int], list[Block]]
"""Blocks by collective and size (in bytes), one per round."""


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
    """Time all-reduces of several sizes by several collectives.

    Args:
        sizes: Message sizes, as ``parse_sizes`` takes them.
        collectives: Comma-separated names; None means all that are possible here.
        hosts: Number of nodes.
        ranks_per_host: Ranks on each node.
        rate: Link rate of each node in tc's notation. None means that all ranks run on this node, without a shaped
            network.
        wire: fp32, bf16 or fp16.
        device: "cpu", or "cuda" for a GPU per rank with NCCL. None means "cuda" if there is no rate and each rank can
            have a GPU.
        rounds: Number of rounds; each round times every collective at every size.
        block_s: Seconds for which each all-reduce is repeated in a round, approximately.

    Raises:
        UserError: An option is wrong, or the network, MPI or enough memory is not available.
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
        _check_timeout(max(asked), hosts, rate)
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
    """Parse a list of sizes and ranges into sorted sizes in bytes.

    ``2KB..64MB`` doubles from 2 KiB on, ``2KB..64MB:4`` multiplies by four. A range includes both ends. K, M and G are
    powers of 1024, as in nccl-tests.

    Raises:
        UserError: ``text`` is no such list.
    """

    def sizes_of(part: str) -> tuple[int, ...]:
        match = re.fullmatch(rf"{SIZE}(?:\.\.{SIZE}(?::(\d{{1,9}}))?)?", part.upper(), re.ASCII)
        first = int(match[1]) * UNITS[match[2]] if match else 0
        last = int(match[3]) * UNITS[match[4]] if match and match[3] else first
        step = int(match[5] or 2) if match else 2
        if first == 0 or step < 2:
            raise UserError(f"--sizes {text} is not a list of sizes above 0; write for example 4KB,2MB or 2KB..64MB:4")
        if first > last:
            raise UserError(f"--sizes {text} has a range that begins above its end; write the smaller size first")
        return tuple(geometric_range(first, last, step))

    return sorted({size for sizes in listed("--sizes", text, sizes_of) for size in sizes})


def parse_collectives(text: str | None, levels: bool, gpus: bool) -> list[Means]:
    """Parse a comma-separated list of different collectives.

    Args:
        text: The list. None means all, except ``hierarchical`` without ``levels``, and MPI if it is not installed or
            values are on GPUs.
        levels: Whether there are several nodes of several ranks, as ``hierarchical`` needs.
        gpus: Whether values are on GPUs.

    Raises:
        UserError: A name is unknown, or its collective cannot run here.
    """
    known = (*get_args(Collective), "mpi")
    lacking = mpi.lacking()
    if text is None:
        if lacking is not None and not gpus:
            warn(f"mpi is left out, since there is no {lacking}; {mpi.INSTALL} brings it")
        left_out = {"hierarchical"} if not levels else set()
        return [name for name in known if name not in left_out | ({"mpi"} if gpus or lacking is not None else set())]

    def means_called(name: str) -> Means:
        if name not in known:
            raise UserError(f"--collectives {text}: there is no {name!r}; choose among {', '.join(known)}")
        return name  # type: ignore[return-value]  # it is known

    chosen = listed("--collectives", text, means_called)
    if "hierarchical" in chosen and not levels:
        raise UserError(
            "--collectives hierarchical goes between hosts of several ranks; give it --rate, and at least 2 for both "
            "--hosts and --ranks-per-host"
        )
    if "mpi" in chosen and gpus:
        raise UserError("--collectives mpi sends from a processor's memory; add --device cpu, or leave mpi out")
    if "mpi" in chosen and lacking is not None:
        raise UserError(f"--collectives mpi: there is no {lacking}; {mpi.INSTALL}, or leave mpi out")
    return chosen


def _check_memory(size: int, by_mpi: bool, ranks: int) -> None:
    """Raise UserError if memory does not suffice for these messages and ranks."""
    each = _RANK_BYTES + _COPIES * size + (_MPI_RANK_BYTES + _MPI_COPIES * size if by_mpi else 0)
    free = usable_memory()
    if ranks * each > free:
        raise UserError(
            f"--sizes up to {size_text(size)} between {ranks} ranks take {ranks * each / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} are free; ask for smaller messages, or fewer ranks"
        )


def _check_timeout(size: int, hosts: int, rate: str) -> None:
    """Raise UserError if an all-reduce would come near gloo's timeout."""
    least_s = _leaving(size, hosts) * 8 / parse_rate(rate)
    if 4 * least_s > TIMEOUT.total_seconds():
        raise UserError(
            f"--sizes up to {size_text(size)} take at least {least_s:.0f} s an all-reduce at --rate {rate}; ask for "
            "smaller messages, or a faster link"
        )


def _leaving(size: int, hosts: int) -> float:
    """Return the bytes that each of ``hosts`` nodes must send to sum messages of ``size`` bytes."""
    return 2 * (hosts - 1) / hosts * size


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
    """Time all collectives in turn, size by size, ``rounds`` times; every rank must call it.

    A first all-reduce, whose result is checked, determines how many are timed together. That number is the same on all
    ranks.

    Args:
        sizes: Message sizes in bytes; each is rounded up so that it can be cut evenly.
        means: The collectives.
        wire: The dtype of the messages.
        rounds: Number of rounds.
        block_s: Seconds for which each all-reduce is repeated in a round, approximately.
        gpus: Whether messages are on this rank's GPU.
        counted: Whether to count bytes on the node's link; needs a shaped network.
        mpi_folder: Directory with the sockets of the MPI ranks; None without MPI.

    Returns:
        This rank's blocks by collective and size in bytes, after rounding.
    """
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
            once = averaging(name, part, topology)
            if checked:
                check(once, part, sums=name == "native")
            part.zero_()  # repeated sums of zeros stay finite
            latency_s, kernel_bytes = time_repetitions(
                once, times, dist.barrier, torch.cuda.synchronize if gpus else None, counted
            )
        return Block(latency_s, kernel_bytes, times)

    done = 0

    def report(round_: str, elements: int) -> None:
        nonlocal done
        size = size_text(elements * dtype.itemsize)
        report_progress(f"{round_}, messages of {size}", done, (rounds + 1) * len(lengths) * len(means))
        done += 1

    often: dict[tuple[Means, int], int] = {}
    for elements in lengths:
        for name in means:
            report("trying", elements)
            first = torch.tensor(block(name, elements, 1, checked=True).latency_s, device=device)
            dist.all_reduce(first, dist.ReduceOp.MAX)
            often[name, elements] = min(_MOST_TIMES, max(1, math.ceil(block_s / float(first))))
    blocks: Blocks = {(name, elements * dtype.itemsize): [] for elements in lengths for name in means}
    for turn in range(rounds):
        begin = turn % len(means)
        for elements in lengths:
            for name in [*means[begin:], *means[:begin]]:
                report(f"round {turn + 1} of {rounds}", elements)
                times = often[name, elements]
                blocks[name, elements * dtype.itemsize].append(block(name, elements, times))
    topology.close()
    return blocks


def averaging(collective: Collective, values: Tensor, topology: Topology) -> Callable[[], object]:
    """Return a function that averages ``values`` in place, in pieces; the backend's own all-reduce leaves the sum."""
    if collective == "native":
        return partial(dist.all_reduce, values)
    return all_reduces(values.split(piece_elements(topology.layout, format_of(values.dtype))), collective, topology)


def check(once: Callable[[], object], message: Tensor, sums: bool) -> None:
    """Assert that an all-reduce of ``message`` yields the mean or sum over ranks: a wrong one must not win by speed."""
    ranks = dist.get_world_size()
    fill_unevenly(message, dist.get_rank() + 1)
    once()
    expected = torch.empty_like(message)
    fill_unevenly(expected, (ranks + 1) / 2 * (ranks if sums else 1))
    error = ranks * torch.finfo(message.dtype).eps  # each of the additions may round
    assert torch.allclose(message, expected, rtol=error), "an all-reduce has come out wrong"
