"""What a network that is described and not measured costs: links of collectives, and the wait for the slowest rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from imagenet_fast.cost_model.collectives import RankLayout, butterfly_bytes, cost_of, row_of
from imagenet_fast.cost_model.messages import Links
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.sync_table import Collective

PAYLOAD = 0.9
"""Share of its line rate that a link is assumed to carry as payload; the rest is protocol overhead."""
CALL_S, INSIDE_S, BETWEEN_S = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a library call, of a hop over NVLink inside a node, and of a hop between nodes.

They are from the cost model by which NCCL chooses its algorithms (its src/graph/tuning.cc, protocol Simple).
"""
_LONG = 2**24  # bytes for which NCCL's algorithm is chosen
_TREE_INSIDE_S, _TREE_SHARE = 4e-6, 0.92
_NVLS_S, _NVLS_GAIN = 25e-6, 1.8  # switches add up: NVLink carries each value about once instead of twice


@dataclass(frozen=True)
class StatedNetwork(Links):
    """A network of equal nodes, and what its collectives cost. Rates are in bytes a second."""

    layout: RankLayout
    """The ranks."""
    nic_bytes_per_s: float
    """Payload that all NICs of a node carry together."""
    inside_bytes_per_s: float = math.inf
    """Payload that each rank exchanges with others of its node."""
    inside_s: float = INSIDE_S
    """Seconds of a hop inside a node."""
    between_s: float = BETWEEN_S
    """Seconds of a hop between nodes; where ranks are on CPUs, of a whole all-reduce, as gloo's are measured."""
    in_switches: bool = False
    """Whether NVLink's switches can add up (NVLS)."""
    servers: int = 1
    """Servers of a ``parameter_server``."""
    inside_scale: float = 1.0
    """Bytes that go inside a node per byte between nodes, for collectives of two levels: 2 for codes, sent as bf16."""
    typical_bytes_per_s: float | None = None
    """Payload of the NICs for which NCCL's algorithm is chosen, so that it stays the same at a better or worse rate;
    None: ``nic_bytes_per_s``."""

    def link(self, collective: Collective) -> LinkModel:
        """Return latency and seconds per byte, for bytes counted as in a ring.

        Pieces overlap, so the slower of NIC and node counts. The latency is that of a tree over the nodes.
        """
        layout, each = self.layout, self.layout.nodes[0]
        if layout.size == 1:
            return LinkModel(0.0, 0.0)
        share, cost = nic_share(collective, layout, self.servers), cost_of(collective, layout, self.servers)
        between, inside = share / self.nic_bytes_per_s, 2 * (each - 1) / each / self.inside_bytes_per_s
        if layout.row > 1 and collective in ("hierarchical", "ring", "butterfly"):
            inside *= self.inside_scale
        if len(layout.nodes) == 1:
            inside *= cost
        if not layout.on_gpu:
            return LinkModel(self.between_s, max(between, inside) / cost)
        if collective in ("native", "ring"):
            typical = self._algorithms(share / (self.typical_bytes_per_s or self.nic_bytes_per_s), inside)
            fastest = min(typical, key=lambda name: typical[name].seconds(_LONG))
            return self._algorithms(between, inside)[fastest]
        hops_s = (each - 1) * self.inside_s + math.ceil(math.log2(len(layout.nodes))) * self.between_s
        return LinkModel(CALL_S + 2 * hops_s, max(between, inside) / cost, CALL_S)

    def _algorithms(self, between: float, inside: float) -> dict[str, LinkModel]:
        nodes, each = len(self.layout.nodes), self.layout.nodes[0]
        ring_s = CALL_S + 2 * (self.layout.size - nodes) * self.inside_s + 2 * (nodes - 1) * self.between_s
        levels = math.ceil(math.log2(nodes))
        tree_s = CALL_S + 2 * ((each - 1) * (self.inside_s + _TREE_INSIDE_S - INSIDE_S) + levels * self.between_s)
        found = {
            "ring": LinkModel(ring_s, max(between, inside), CALL_S),
            "tree": LinkModel(tree_s, max(between, inside) / _TREE_SHARE, CALL_S),
        }
        if self.in_switches and each > 1:
            nvls_s = CALL_S + _NVLS_S + 2 * levels * self.between_s
            found["NVLS"] = LinkModel(nvls_s, max(between, inside / _NVLS_GAIN), CALL_S)
        return found


def nic_share(collective: Collective, layout: RankLayout, servers: int = 1) -> float:
    """Return the bytes that the busiest node sends to other nodes, per byte of a long message.

    All ranks of a node share its NICs. Nodes have equally many ranks.
    """
    each, ranks = layout.nodes[0], layout.size
    if ranks == each:
        return 0.0
    match collective:
        case "native":
            return 2 * (ranks - 1) / ranks  # one rank of each node sends to the next node
        case "butterfly":
            return _grid_share(each, ranks, layout.row) * butterfly_bytes(layout.column)
        case "parameter_server":
            servers = min(servers, ranks)
            here = sum(1 for number in range(servers) if number * ranks // servers < each)  # on the first node
            return each * (servers - here) / servers + here * (ranks - each) / servers
        case _:
            return _grid_share(each, ranks, row_of(collective, layout))


def _grid_share(each: int, ranks: int, width: int) -> float:
    """Return ``nic_share`` of a grid: rows of ``width`` ranks of a node, 1 or all of them, and columns between rows.

    A scatter goes straight to all ranks of a column, a gather around a ring of them.
    """
    here, column = each // width, ranks // width
    return (here * (column - here) + column - 1) / column


@cache
def expected_max(ranks: int) -> float:
    """Return the mean of the largest of ``ranks`` draws from the standard normal distribution.

    It is the integral of 1 - F(x)^P over positive x, less that of F(x)^P over negative x, out to 10 deviations.
    """
    width, total = 20 / 4000, 0.0
    for step in range(4000):
        x = -10.0 + (step + 0.5) * width
        below = (math.erfc(-x / math.sqrt(2)) / 2) ** ranks
        total += width * (1 - below if x > 0 else -below)
    return total
