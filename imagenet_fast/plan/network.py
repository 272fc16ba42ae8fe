"""The link of a collective on a network that is described and not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from imagenet_fast.cost_model.collectives import RankLayout, cost_of, nic_share
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
class StatedNetwork:
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

    def seconds(self, collective: Collective, message: float, servers: int = 1) -> float:
        """Return the seconds of an all-reduce of ``message`` bytes, with nothing else on the wire."""
        bytes_of_ring = message * cost_of(collective, self.layout, servers)
        return replace(self, servers=servers).link(collective).seconds(bytes_of_ring)

    def link(self, collective: Collective) -> LinkModel:
        """Return latency and seconds per byte, for bytes counted as in a ring: the slower of NIC and node counts."""
        if self.layout.size == 1:
            return LinkModel(0.0, 0.0)
        if collective == "hierarchical" and self.layout.on_gpu:
            return self.hierarchy()
        share = nic_share(collective, self.layout, self.servers)
        between = share / self.nic_bytes_per_s
        inside = self._inside(self.inside_scale if collective in ("ring", "butterfly") else 1.0)
        if len(self.layout.nodes) == 1:
            inside *= self.relative_bytes(collective)
        if not self.layout.on_gpu:
            return LinkModel(self.between_s, max(between, inside) / self.relative_bytes(collective))
        if collective in ("native", "ring"):
            typical = self._algorithms(share / (self.typical_bytes_per_s or self.nic_bytes_per_s), inside)
            fastest = min(typical, key=lambda name: typical[name].seconds(_LONG))
            return self._algorithms(between, inside)[fastest]
        return replace(self.hierarchy(), s_per_byte=max(between, inside) / self.relative_bytes(collective))

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

    def relative_bytes(self, collective: Collective) -> float:
        """Return the cost of a long message, relative to a ring all-reduce."""
        return cost_of(collective, self.layout, self.servers)
