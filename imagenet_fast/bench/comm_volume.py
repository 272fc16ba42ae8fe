"""Count what an engine's step costs a rank at large scale, without a network.

A layer profile provides the gradients' shapes, and the times that engines plan with; nothing waits for these times.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

from imagenet_fast.bench.fake_step import Call, count_step, fake_ranks
from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.forks import ForkedRanks
from imagenet_fast.netlab.namespaces import parse_rate
from imagenet_fast.plan.network import PAYLOAD, StatedNetwork
from imagenet_fast.progress import measurement_bar
from imagenet_fast.recipe.sync_config import Sync
from imagenet_fast.recipe.sync_table import Collective, Wire
from imagenet_fast.sync import EngineSettings


@dataclass(frozen=True)
class Count(Row):
    """One engine's step on its busiest rank of the first two nodes."""

    note = "A step of the busiest rank. NIC MB: sent by a node to others. least MB: the least that this can be."

    engine: str = field(metadata=column("engine"))
    """Name of the engine."""
    wire: Wire = field(metadata=column("wire"))
    """Wire dtype."""
    collective: Collective = field(metadata=column("collective"))
    """The collective that carries most bytes."""
    model: str
    """Layer profile whose messages were counted."""
    ranks: int = field(metadata=column("ranks"))
    """Number of ranks."""
    ranks_per_node: int
    """Ranks on each node."""
    calls: int = field(metadata=column("calls"))
    """Number of backend calls; sends and receives issued as one batch count as one."""
    messages: int = field(metadata=column("messages"))
    """Number of messages from this rank to others; a vector operation sends one to each."""
    smallest_message: int | None = field(metadata=column("smallest B"))
    """Size of the smallest message in bytes; None if there are no messages."""
    kernels: int = field(metadata=column("kernels"))
    """Number of operations that compute or copy; views, allocations and the backend's are not counted."""
    updates: int = field(metadata=column("updates"))
    """Number of the optimizer's updates in a step; a deferring engine updates what came with one message together."""
    nic_bytes: int = field(metadata=column("NIC", "MB", ".1f"))
    """Bytes sent by the busier of the first two nodes to other nodes."""
    least_nic_bytes: float = field(metadata=column("least", "MB", ".1f"))
    """Minimum for ``nic_bytes``: 2 (H-1)/H times the wire bytes that the step averages over H nodes.

    These are gradients, and whatever else must be averaged for them.
    """

    @property
    def title(self) -> str:
        """Name the model and the nodes."""
        each = f"{self.ranks_per_node} rank{'s' if self.ranks_per_node > 1 else ''}"
        return f"{self.model}, nodes of {each}: counted, without a network"


def bench_count(
    profile: Profile, engines: Sequence[Sync], sizes: Sequence[int], ranks_per_node: int, link: str
) -> list[Count]:
    """Count one step of every engine on each number of ranks.

    Args:
        profile: The layer profile that provides shapes and times.
        engines: The engines to count.
        sizes: Numbers of ranks.
        ranks_per_node: Ranks in each node.
        link: Rate of each node's link in tc's notation, such as ``100gbit``.

    Raises:
        UserError: An engine cannot be counted, ``sizes`` are not of whole nodes, or ``link`` cannot be parsed.
    """
    for ranks in sizes:
        if ranks % ranks_per_node:
            raise UserError(f"--ranks {ranks} is no whole number of nodes of --nproc {ranks_per_node}; change one")
    for settings in engines:
        if not settings.ours:
            raise UserError(f"--sync {settings.kind} is torch's and its calls can't be counted; leave it out")
        if settings.chooses:
            raise UserError(f"--sync {settings.kind} becomes one of the other engines; name those instead")
    bits_per_s, rows = parse_rate(link), list[Count]()
    with measurement_bar() as show:
        for settings in engines:  # each in its own process, so without the process groups of another
            with closing(ForkedRanks(1, nullcontext, preload=__name__)) as process:
                for ranks in sizes:
                    show(f"counting {settings.kind}", len(rows), len(engines) * len(sizes))
                    rows += process.run(_count, profile, settings, ranks, ranks_per_node, bits_per_s)
    return rows


def _count(profile: Profile, settings: EngineSettings, ranks: int, ranks_per_node: int, bits_per_s: int) -> Count:
    nodes = ranks // ranks_per_node
    link = StatedNetwork(RankLayout((ranks_per_node,) * nodes), PAYLOAD * bits_per_s / 8).link("hierarchical")
    # The first two nodes include the busiest: a parameter server is on the first. If the number of nodes is not a power
    # of two, the second has the extra work of a butterfly.
    steps = []
    for rank in range(min(nodes, 2) * ranks_per_node):
        with fake_ranks(rank, ranks):
            steps.append(count_step(profile, settings, ranks_per_node, link))
    busiest = max(steps, key=lambda step: (len(step.calls), _messages(step.calls)))
    leaving = [0] * min(nodes, 2)
    for rank, step in enumerate(steps):
        node = rank // ranks_per_node
        sent = (message for call in step.calls for message in call)
        leaving[node] += sum(count * size for to, count, size in sent if to // ranks_per_node != node)
    return Count(
        settings.kind, settings.wire, busiest.collective, profile.model, ranks, ranks_per_node,
        len(busiest.calls), _messages(busiest.calls),
        min((size for call in busiest.calls for _, _, size in call), default=None), busiest.kernels, busiest.updates,
        max(leaving),
        2 * (nodes - 1) / nodes * busiest.averaged_bytes if nodes > 1 else 0.0,
    )  # fmt: skip


def _messages(calls: Sequence[Call]) -> int:
    return sum(count for call in calls for _, count, _ in call)
