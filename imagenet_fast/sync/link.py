"""What the network costs: a latency and a time a byte, measured, the same on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce
from imagenet_fast.sync.lane import Lane

_TINY, _SHORT, _LONG = 2**13, 2**20, 2**22  # bytes; of the difference between two, what a link can burst drops out
_REPEATS = 4


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes takes ``latency_s`` + n ``s_per_byte``, with nothing else on the wire."""

    latency_s: float
    s_per_byte: float

    def seconds(self, message: float) -> float:
        return self.latency_s + message * self.s_per_byte


def measure_link(collective: Collective, wire: torch.dtype, lane: Lane, device: torch.device) -> Link:
    """Time three sizes of ``collective``, the fastest of four; rank 0's result, so that all ranks decide alike.

    Every rank must call it, with nothing else under way. The values have the wire's dtype already: casts of fresh
    memory cost the processor up to a third of the time and say nothing of the network.
    """
    latency_s, short_s, long_s = (
        min(_seconds(size // wire.itemsize, wire, collective, lane, device) for _ in range(_REPEATS))
        for size in (_TINY, _SHORT, _LONG)
    )
    s_per_byte = max(0.0, long_s - short_s) / (_LONG - _SHORT)
    fit = torch.tensor([latency_s, s_per_byte], dtype=torch.float64, device=device)
    dist.broadcast(fit, src=0)
    return Link(*fit.tolist())


def _seconds(elements: int, wire: torch.dtype, collective: Collective, lane: Lane, device: torch.device) -> float:
    values = torch.zeros(elements, dtype=wire, device=device)
    dist.barrier()
    begun = time.perf_counter()
    all_reduce(values, wire, collective, lane).wait()
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
