"""What a step of an engine costs a rank at a scale that nobody here has, counted without a network.

A layer profile gives the gradients' shapes and the times that plans are made from; nothing waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mode

from rich.table import Table

from imagenet_fast.bench.fake_step import CountedStep, fake_ranks
from imagenet_fast.bench.netns import parse_rate
from imagenet_fast.bench.processes import in_processes
from imagenet_fast.bench.whole_numbers import whole_numbers
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.link_model import LinkModel
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.recipe.sync_config import Collective, Sync, Wire
from imagenet_fast.sync import EngineSettings
from imagenet_fast.sync.comm_stream import Call

COUNTED = "lazy,dear,ring,hybrid,sparse"

# What a link is taken to carry of its line rate, the rest being protocol.
_PAYLOAD = 0.9
# Seconds, from the cost model that NCCL chooses its algorithms by (its src/graph/tuning.cc, protocol Simple): a call of
# the library, a hop over NVLink inside a node, a hop between nodes.
_CALL_S, _INSIDE_S, _BETWEEN_S = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True)
class Count:
    """A step of one engine, as its busiest rank of the first two nodes goes through it."""

    engine: str
    wire: Wire
    collective: Collective
    """By which most bytes go."""
    model: str
    ranks: int
    ranks_per_node: int
    calls: int
    """Of the backend; sends and receives that are handed over together are one."""
    messages: int
    """From this rank to another; a vector operation sends one to each."""
    smallest_message: int | None
    """Bytes; None where there are no messages."""
    kernels: int
    """Operations that compute or copy, not those that view or allocate, nor the backend's."""
    host_ms: float
    """Processor time of a step: hooks, launches and waits; without autograd, the optimiser's work and what the
    backend's calls take by themselves. The least of 20, since what else the machine does only adds to it."""
    meta_ms: float
    """The part of it that the kernels take by themselves on the meta device, where a GPU's launches would be."""
    nic_bytes: int
    """Out of the busier of the first two nodes."""
    least_nic_bytes: float
    """2 (H-1)/H times the wire bytes of the gradients that this step averages over H nodes, and of what else must be
    averaged for it."""


def bench_count(profile: Profile, engines: Sequence[Sync], ranks: str, ranks_per_node: int, link: str) -> list[Count]:
    """Count a step of every engine on each number of ``ranks``, a list such as 8,64, in nodes that are linked at
    ``link``. Raises UserError."""
    sizes, bits_per_s = parse_ranks(ranks, ranks_per_node), parse_rate(link)
    counted = [_countable(settings) for settings in engines]
    rows: list[Count] = []
    for settings in counted:  # each in a process of its own, with no other's groups
        rows += in_processes(
            1, "imagenet_fast.bench.comm_volume", _counts, profile, settings, sizes, ranks_per_node, bits_per_s
        )[0]
    return rows


def parse_ranks(text: str, ranks_per_node: int) -> list[int]:
    """The numbers of a list such as 8,64,512. Raises UserError where one is no number of full nodes."""
    sizes = whole_numbers("--ranks", text, "8,64,512")
    for ranks in sizes:
        if ranks % ranks_per_node:
            raise UserError(
                f"--ranks {ranks} is no whole number of nodes of --ranks-per-node {ranks_per_node}; change one"
            )
    return sizes


def stated_link(nodes: int, ranks_per_node: int, bits_per_s: float) -> LinkModel:
    """What an all-reduce by levels is taken to cost, n bytes on each of ``ranks_per_node`` ranks of each node.

    The ranks of a node share its link, through which 2 (H-1)/H n bytes pass; what they send each other takes no time.
    Latency is that of a tree over the nodes. Of a single node only the latency is left.
    """
    hops_s = (ranks_per_node - 1) * _INSIDE_S + math.ceil(math.log2(nodes)) * _BETWEEN_S
    return LinkModel(_CALL_S + 2 * hops_s, 2 * (nodes - 1) / nodes * 8 / (_PAYLOAD * bits_per_s), _CALL_S)


def count_table(counts: list[Count]) -> Table:
    """One row an engine and a number of ranks; ``sent`` and ``min B`` are of messages, ``ops`` kernels."""
    main = mode(count.wire for count in counts)
    table = compact_table(
        ("engine", "by"),
        ("ranks", "calls", "sent", "min B", "ops", "ms", "NIC MB", "x min"),
        (
            (
                c.engine if c.wire == main else f"{c.engine} {c.wire}", c.collective, str(c.ranks), str(c.calls),
                str(c.messages), number(c.smallest_message, "d"), str(c.kernels), f"{c.host_ms:.2f}",
                f"{c.nic_bytes / 1e6:.1f}", f"{c.nic_bytes / c.least_nic_bytes:.3f}" if c.least_nic_bytes else "–",
            )
            for c in counts
        ),
    )  # fmt: skip
    node = f"{counts[0].ranks_per_node} rank{'s' if counts[0].ranks_per_node > 1 else ''}"
    table.title = f"{counts[0].model}, nodes of {node}, {main}: counted, without a network"
    return table


def _countable(settings: Sync) -> EngineSettings:
    if not settings.ours:
        raise UserError(f"--sync {settings.kind} is torch's and its calls can't be counted; leave it out with --count")
    if settings.chooses:
        raise UserError(f"--sync {settings.kind} becomes one of the other engines; with --count name those instead")
    return settings  # type: ignore[return-value]  # all others are


def _counts(
    number: int, profile: Profile, settings: EngineSettings, sizes: Sequence[int], ranks_per_node: int, bits_per_s: int
) -> list[Count]:
    return [_count(profile, settings, ranks, ranks_per_node, bits_per_s) for ranks in sizes]


def _count(profile: Profile, settings: EngineSettings, ranks: int, ranks_per_node: int, bits_per_s: int) -> Count:
    nodes = ranks // ranks_per_node
    link = stated_link(nodes, ranks_per_node, bits_per_s)
    # Two nodes tell of all: a parameter server sits on the first, and of nodes beyond a power of two the second bears
    # a butterfly's burden.
    by_rank: list[list[Call]] = []
    for rank in range(min(nodes, 2) * ranks_per_node):
        with fake_ranks(rank, ranks):
            by_rank.append(CountedStep(profile, settings, ranks_per_node, link).noted())
    busiest = max(range(len(by_rank)), key=lambda rank: (len(by_rank[rank]), _messages(by_rank[rank])))
    calls = by_rank[busiest]
    with fake_ranks(busiest, ranks):
        step = CountedStep(profile, settings, ranks_per_node, link, noting=False)
        kernels = step.kernels()
        host_s, meta_s = step.host_s(calls, kernels)
        return Count(
            settings.kind, settings.wire, step.collective, profile.model, ranks, ranks_per_node,
            len(calls), _messages(calls), min((size for call in calls for _, _, size in call.sent), default=None),
            len(kernels), 1e3 * host_s, 1e3 * meta_s, max(_nic_bytes(by_rank, ranks_per_node)),
            2 * (nodes - 1) / nodes * step.averaged_bytes if nodes > 1 else 0.0,
        )  # fmt: skip


def _messages(calls: Sequence[Call]) -> int:
    return sum(count for call in calls for _, count, _ in call.sent)


def _nic_bytes(by_rank: Sequence[Sequence[Call]], ranks_per_node: int) -> list[int]:
    """What leaves each node, given the calls of all its ranks."""
    leaving = [0] * (len(by_rank) // ranks_per_node)
    for rank, calls in enumerate(by_rank):
        node = rank // ranks_per_node
        for call in calls:
            leaving[node] += sum(count * size for to, count, size in call.sent if to // ranks_per_node != node)
    return leaving
