"""The links of collectives on a network that is described and not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

from imagenet_fast.cost_model.collectives import RankLayout, butterfly_bytes, cost_of
from imagenet_fast.cost_model.messages import Links
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.engine_table import Collective

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
    call_s: float = CALL_S
    """Seconds that a launch keeps the host."""
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
        """Return latency and seconds per byte, for bytes counted as in a ring: the slower of NIC and node counts."""
        if self.layout.size == 1:
            return LinkModel(0.0, 0.0)
        if collective == "hierarchical" and self.layout.on_gpu:
            return self.hierarchy()
        share = nic_share(collective, self.layout, self.servers)
        between = share / self.nic_bytes_per_s
        inside = self._inside(self.inside_scale if collective in ("ring", "butterfly") else 1.0)
        cost = cost_of(collective, self.layout, self.servers)
        if len(self.layout.nodes) == 1:
            inside *= cost
        if not self.layout.on_gpu:
            return LinkModel(self.between_s, max(between, inside) / cost)
        if collective in ("native", "ring"):
            typical = self._algorithms(share / (self.typical_bytes_per_s or self.nic_bytes_per_s), inside)
            fastest = min(typical, key=lambda name: typical[name].seconds(_LONG))
            return self._algorithms(between, inside)[fastest]
        return replace(self.hierarchy(), s_per_byte=max(between, inside) / cost)

    def hierarchy(self) -> LinkModel:
        """Return the cost of a hierarchical all-reduce of n bytes on each rank.

        The ranks of a node share its NICs, which carry 2 (H-1)/H n bytes for H nodes. Pieces overlap, so the slower of
        NIC and node counts. The latency is that of a tree over the nodes.
        """
        nodes, each = len(self.layout.nodes), self.layout.nodes[0]
        hops_s = (each - 1) * self.inside_s + math.ceil(math.log2(nodes)) * self.between_s
        between = 2 * (nodes - 1) / nodes / self.nic_bytes_per_s
        return LinkModel(self.call_s + 2 * hops_s, max(between, self._inside(self.inside_scale)), self.call_s)

    def _inside(self, scale: float) -> float:
        """Return the seconds inside a node per byte; with two levels, ``scale`` bytes go inside for one between."""
        each = self.layout.nodes[0]
        return (scale if self.layout.row > 1 else 1.0) * 2 * (each - 1) / each / self.inside_bytes_per_s

    def _algorithms(self, between: float, inside: float) -> dict[str, LinkModel]:
        nodes, each, call_s = len(self.layout.nodes), self.layout.nodes[0], self.call_s
        ring_s = call_s + 2 * (self.layout.size - nodes) * self.inside_s + 2 * (nodes - 1) * self.between_s
        levels = math.ceil(math.log2(nodes))
        tree_s = call_s + 2 * ((each - 1) * (self.inside_s + _TREE_INSIDE_S - INSIDE_S) + levels * self.between_s)
        found = {
            "ring": LinkModel(ring_s, max(between, inside), call_s),
            "tree": LinkModel(tree_s, max(between, inside) / _TREE_SHARE, call_s),
        }
        if self.in_switches and each > 1:
            found["NVLS"] = LinkModel(
                call_s + _NVLS_S + 2 * levels * self.between_s, max(between, inside / _NVLS_GAIN), call_s
            )  # fmt: skip
        return found


def nic_share(collective: Collective, layout: RankLayout, servers: int = 1) -> float:
    """Return the bytes that the busiest node sends to other nodes, per byte of a long message.

    All ranks of a node share its NICs. Nodes have equally many ranks.
    """
    nodes, each, ranks = len(layout.nodes), layout.nodes[0], layout.size
    if nodes == 1:
        return 0.0
    match collective:
        case "hierarchical":
            return 2 * (nodes - 1) / nodes
        case "ring":
            return 2 * (layout.column - 1) / layout.column  # with one rank a node, a ring of nodes
        case "native":
            return 2 * (ranks - 1) / ranks  # one rank of each node sends to the next node
        case "butterfly":
            return 2 * (layout.column - 1) / layout.column * butterfly_bytes(layout.column)
        case "pairwise":  # each rank scatters to all others; the gather is the backend's ring
            return each * (ranks - each) / ranks + (ranks - 1) / ranks
        case "torus2d":
            return _torus_share(each, ranks, layout.square_row)
        case "parameter_server":
            return _server_share(each, ranks, min(servers, ranks))
        case _:
            assert_never(collective)


def _torus_share(each: int, ranks: int, width: int) -> float:
    """Return ``nic_share`` of a torus: rows of ``width`` neighbours scatter and gather, columns average a part."""
    height = ranks // width

    def across(node: int) -> float:
        """Return what a node sends to others."""
        here, sent = range(node * each, (node + 1) * each), 0.0
        for rank in here:
            row = range(rank - rank % width, rank - rank % width + width)
            sent += sum(1 for other in row if other not in here) / width  # the scatter to ranks of the row
            next_in_row = row[0] + (rank + 1 - row[0]) % width
            sent += (width - 1) / width if width > 1 and next_in_row not in here else 0.0  # the gather's ring
            column = range(rank % width, ranks, width)
            sent += sum(1 for other in column if other not in here) / height / width
            below = (rank + width) % ranks
            sent += (height - 1) / height / width if height > 1 and below not in here else 0.0
        return sent

    repeated = math.lcm(each, width) // each  # nodes after which rows begin at the same place of a node again
    return max(across(node) for node in range(min(repeated, ranks // each)))


def _server_share(each: int, ranks: int, servers: int) -> float:
    """Return ``nic_share`` of parameter servers, for the first node, which has a server."""
    here = sum(1 for number in range(servers) if number * ranks // servers < each)
    return each * (servers - here) / servers + here * (ranks - each) / servers
