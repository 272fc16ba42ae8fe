"""Measure all-reduce bandwidth by message size, for PyTorch's own all-reduce and our collectives.

GradientFlow (arXiv 1902.06855) asks why popular systems leave most of a network idle: short messages do not fill it,
and some collectives never do. Metrics are those of nccl-tests (doc/PERFORMANCE.md). Many all-reduces run between two
clock readings, and the slowest rank counts. Algorithm bandwidth is bytes over seconds. Bus bandwidth is 2 (n-1)/n of
that for n ranks: what a ring would need of each rank's link.

A message already has the wire dtype, because a cast says nothing about the network. Our collectives send it as an
engine would, in pieces that alternate between two lanes, and divide the sum. The backend's own all-reduce is one call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.cost_model.collectives import piece_elements
from imagenet_fast.errors import UserError, listed
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.forks import report_progress
from imagenet_fast.netlab.namespaces import parse_rate
from imagenet_fast.netlab.ranks import TIMEOUT, Lab, on_gpus
from imagenet_fast.netlab.timing import Block, in_turns, time_repetitions
from imagenet_fast.recipe.sync_table import Cast, Collective
from imagenet_fast.sync.all_reduce import format_of, wire_dtype
from imagenet_fast.sync.network_benchmark import all_reduces
from imagenet_fast.sync.topology import Topology
from imagenet_fast.units import SIZE, UNITS, geometric_range, size_text

Backend = Literal["gloo", "nccl"]
"""The library that sends the bytes."""

_COPIES = 4  # copies of a message in a rank's memory at once, with parts received from others
_MOST_TIMES = 200  # maximum number of all-reduces between two clock readings
_Blocks = dict[tuple[Collective, int], list[Block]]  # by size in bytes; one per round


@dataclass(frozen=True)
class NetworkRow(Row):
    """A row that was measured between ranks, with the place first."""

    hosts: int
    """Number of nodes."""
    ranks_per_host: int
    """Ranks on each node."""
    rate: str | None
    """Rate of each node's link, as given; None: the loopback interface."""

    @property
    def network(self) -> str:
        """The place in words, such as ``4 nodes of 2 ranks, 250mbit``."""
        hosts = f"{self.hosts} node{'s' if self.hosts > 1 else ''}"
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{hosts}{ranks}, {self.rate or 'loopback'}"


@dataclass(frozen=True)
class AllReduceTime(NetworkRow):
    """All-reduces of one size by one collective: medians over the rounds.

    Bandwidths are in bytes per second.
    """

    bytes: int = field(metadata=column("bytes", form=size_text))
    """Message size on each rank: the requested size, rounded up so that it can be cut evenly."""
    collective: Collective = field(metadata=column("collective"))
    """All-reduce algorithm, or the backend that has its own."""
    backend: Backend = field(metadata=column("backend"))
    """The library that sends the bytes."""
    dtype: Cast = field(metadata=column("wire"))
    """Dtype on the wire."""
    latency_s: float = field(metadata=column("", "ms", ".4g"))
    """Time of one all-reduce."""
    latency_s_min: float = field(metadata=column("fastest", form=".4g", unit="ms"))
    """That of the fastest round."""
    latency_s_max: float = field(metadata=column("slowest", form=".4g", unit="ms"))
    """That of the slowest round."""
    times: int
    """Number of all-reduces between two clock readings."""
    algorithm_bandwidth: float = field(metadata=column("alg", "MB/s", ".4g"))
    """Bytes of the message over its time, in bytes a second."""
    bus_bandwidth: float = field(metadata=column("bus", "MB/s", ".4g"))
    """The same times 2 (n - 1) / n for n ranks, which a ring's link carries, in bytes a second."""
    utilisation: float | None = field(metadata=column("link use", form=".1%"))
    """Share of the link's rate used by the bytes that must leave a node: 2 (H-1)/H of a message for H nodes.

    None without ``rate``, or if no bytes must leave a node.
    """
    kernel_bytes: float | None
    """Bytes per all-reduce that did leave a node, by its link's counter; None without ``rate``."""

    @property
    def title(self) -> str:
        """Describe the network."""
        return f"all-reduces by message size: {self.network}"


def bench_collectives(
    lab: Lab,
    sizes: Sequence[int],
    collectives: Sequence[Collective] | None,
    wire: Cast,
    device: str | None,
    rounds: int,
    block_s: float,
) -> list[AllReduceTime]:
    """Time all-reduces of ``sizes`` in bytes by several collectives, each at every size in each round.

    None for ``collectives`` means all that are possible here; for the ``device``, "cuda" (NCCL) if there is no rate and
    each rank can have a GPU, else "cpu". In a round each all-reduce is repeated for about ``block_s``.

    Raises:
        UserError: An argument is wrong, or the network or enough memory is not available.
    """
    _check_lab(lab, max(sizes))
    if lab.rate is not None and device == "cuda":
        raise UserError("--device cuda does not go with --rate: NCCL talks past its links; leave one out")
    gpus = on_gpus("cpu" if lab.rate is not None and device is None else device, lab.ranks)
    levels = lab.rate is not None and min(lab.hosts, lab.ranks_per_host) > 1
    if collectives is None:
        collectives = [name for name in get_args(Collective) if levels or name != "hierarchical"]
    elif "hierarchical" in collectives and not levels:
        raise UserError(
            "--collectives hierarchical goes between hosts of several ranks; give it --rate, and at least 2 for both "
            "--nodes and --nproc"
        )
    if not gpus:
        lab.check_memory(
            _COPIES * max(sizes), f"--sizes up to {size_text(max(sizes))} between {lab.ranks} ranks",
            "ask for smaller messages, or fewer ranks",
        )  # fmt: skip
    by_rank: list[_Blocks] = lab.run(measure, sizes, collectives, wire, rounds, block_s, gpus, gpus=gpus)
    backend: Backend = "nccl" if gpus else "gloo"

    def row(collective: Collective, size: int) -> AllReduceTime:
        by_round = list(zip(*(of_rank[collective, size] for of_rank in by_rank), strict=True))
        slowest = [max(block.latency_s for block in of_round) for of_round in by_round]
        seconds = median(slowest)
        leaving = _leaving(size, lab.hosts)
        return AllReduceTime(
            lab.hosts, lab.ranks_per_host, lab.rate, size, collective, backend, wire,
            seconds, min(slowest), max(slowest), by_round[0][0].times,
            size / seconds, 2 * (lab.ranks - 1) / lab.ranks * size / seconds,
            leaving * 8 / parse_rate(lab.rate) / seconds if lab.rate is not None and leaving else None,
            median(fmean(block.kernel_bytes for block in of_round) for of_round in by_round)
            if lab.rate is not None else None,
        )  # fmt: skip

    return [row(*key) for key in by_rank[0]]


def _check_lab(lab: Lab, size: int) -> None:
    """Raise UserError if there is but one rank, or if an all-reduce of ``size`` bytes would come near the timeout."""
    if lab.ranks == 1:
        raise UserError("--nodes 1 with --nproc 1 is one rank, which has nobody to send to; raise one of them")
    least_s = 0.0 if lab.rate is None else _leaving(size, lab.hosts) * 8 / parse_rate(lab.rate)
    if 4 * least_s > TIMEOUT.total_seconds():
        raise UserError(
            f"--sizes up to {size_text(size)} take at least {least_s:.0f} s an all-reduce at --rate {lab.rate}; ask "
            "for smaller messages, or a faster link"
        )


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


def _leaving(size: int, hosts: int) -> float:
    """Return the bytes that each of ``hosts`` nodes must send to sum messages of ``size`` bytes."""
    return 2 * (hosts - 1) / hosts * size


def measure(
    sizes: Sequence[int], collectives: Sequence[Collective], wire: Cast, rounds: int, block_s: float, gpus: bool
) -> _Blocks:
    """Time all collectives on this rank in turns, with messages on its GPU if there are ``gpus``.

    Sizes are rounded up so that they can be cut evenly. A first all-reduce of each, whose result is checked, determines
    how many are timed together, the same on all ranks. Returns this rank's blocks by collective and size.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    topology, dtype = Topology(device), wire_dtype(wire)
    lengths = list(dict.fromkeys(topology.padded(-(-size // dtype.itemsize)) for size in sizes))
    message = torch.empty(lengths[-1], dtype=dtype, device=device)
    keys = [(name, length * dtype.itemsize) for length in lengths for name in collectives]
    times = dict[tuple[Collective, int], int]()

    def block(name: Collective, size: int) -> Block:
        part = message[: size // dtype.itemsize]
        once = averaging(name, part, topology)
        if (name, size) not in times:
            check(once, part, sums=name == "native")
        part.zero_()  # repeated sums of zeros stay finite
        return time_repetitions(once, times.get((name, size), 1), torch.cuda.synchronize if gpus else lambda: None)

    for key in keys:
        report_progress(f"trying {key[0]}", 0, rounds * len(keys))
        slowest_s = torch.tensor(block(*key).latency_s, device=device)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        times[key] = min(_MOST_TIMES, max(1, math.ceil(block_s / slowest_s.item())))
    blocks = in_turns(keys, rounds, lambda key: block(*key), report_progress)
    topology.close()
    return blocks


def averaging(collective: Collective, values: Tensor, topology: Topology) -> Callable[[], object]:
    """Return a function that averages ``values`` in place, in pieces; the backend's own all-reduce leaves the sum."""
    if collective == "native":
        return partial(dist.all_reduce, values)
    return all_reduces(values.split(piece_elements(topology.layout, format_of(values.dtype))), collective, topology)


def check(once: Callable[[], object], message: Tensor, sums: bool) -> None:
    """Assert that an all-reduce of ``message`` yields the mean or sum over ranks: a wrong one must not win by speed."""
    ranks, expected = dist.get_world_size(), torch.empty_like(message)
    for values, value in ((message, dist.get_rank() + 1), (expected, (ranks + 1) / 2 * (ranks if sums else 1))):
        values[:] = value
        values[0], values[-1] = -value, value / 2  # shows whether an end is moved or left out
    once()
    error = ranks * torch.finfo(message.dtype).eps  # each of the additions may round
    assert torch.allclose(message, expected, rtol=error), "an all-reduce has come out wrong"
