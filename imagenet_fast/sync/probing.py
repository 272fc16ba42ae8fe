"""What the network costs, measured: the same on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from imagenet_fast.cost.link import Link
from imagenet_fast.recipe.engine_settings import Collective
from imagenet_fast.sync.codecs import PLAIN, is_coded
from imagenet_fast.sync.collectives import all_reduce, carry
from imagenet_fast.sync.topology import Topology

_TINY, _SHORT, _LONG = 2**13, 2**20, 2**22  # bytes; of the difference between two, what a link can burst drops out
_REPEATS = 4


class Network:
    """The link of each collective, measured when it is first asked for: every rank must ask alike, with nothing else
    under way. ``stated`` is taken instead where there is nothing to measure."""

    def __init__(self, topology: Topology, wire: torch.dtype, stated: Link | None = None) -> None:
        self._topology = topology
        self._wire = PLAIN if is_coded(wire) else wire  # what codes cost is not the network's
        self._stated = stated
        self._links: dict[Collective, Link] = {}

    def link(self, collective: Collective) -> Link:
        if self._stated is not None:
            return self._stated
        if self._topology.size == 1:
            return Link(0.0, 0.0)
        if collective not in self._links:
            self._links[collective] = measure_link(collective, self._wire, self._topology)
        return self._links[collective]


def measure_link(collective: Collective, wire: torch.dtype, topology: Topology) -> Link:
    """Time three sizes of ``collective``, the fastest of four; the first rank's result, so that all ranks decide alike.

    Every rank must call it, with nothing else under way. The values have the wire's dtype already: casts of fresh
    memory cost the processor up to a third of the time and say nothing of the network.
    """
    latency_s, short_s, long_s = (
        min(_seconds(size, wire, collective, topology) for _ in range(_REPEATS)) for size in (_TINY, _SHORT, _LONG)
    )
    s_per_byte = max(0.0, long_s - short_s) / (_LONG - _SHORT)
    fit = torch.tensor([latency_s, s_per_byte], dtype=torch.float64, device=topology.device)
    dist.broadcast(fit, src=topology.ranks[0], group=topology.group)
    return Link(*fit.tolist())


def _seconds(size: int, wire: torch.dtype, collective: Collective, topology: Topology) -> float:
    elements = topology.padded(size // wire.itemsize)
    values = torch.zeros(elements, dtype=wire, device=topology.device)
    phases = all_reduce(values, wire, collective, topology)
    dist.barrier(topology.group)
    begun = time.perf_counter()
    carry(phases).wait()
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
