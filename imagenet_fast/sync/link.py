"""What the network costs: a latency and a time a byte, fitted to two measured sizes, the same on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from imagenet_fast.recipe import Collective
from imagenet_fast.sync.collectives import all_reduce
from imagenet_fast.sync.lane import Lane

_SMALL, _LARGE = 2**13, 2**21  # bytes
_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes takes ``latency_s`` + n ``s_per_byte``, with nothing else on the wire."""

    latency_s: float
    s_per_byte: float

    def seconds(self, message: float) -> float:
        return self.latency_s + message * self.s_per_byte


def measure_link(collective: Collective, wire: torch.dtype, lane: Lane, device: torch.device) -> Link:
    """Time two sizes of ``collective``, the median of three; rank 0's result, so that all ranks decide alike.

    Every rank must call it, with nothing else under way.
    """
    times = []
    for size in (_SMALL, _LARGE):
        values = torch.zeros(size // wire.itemsize, device=device)
        times.append(median(_seconds(values, wire, collective, lane) for _ in range(_REPEATS + 1)))
    s_per_byte = max(0.0, times[1] - times[0]) / (_LARGE - _SMALL)
    fit = torch.tensor([max(0.0, times[0] - _SMALL * s_per_byte), s_per_byte], dtype=torch.float64, device=device)
    dist.broadcast(fit, src=0)
    latency_s, s_per_byte = fit.tolist()
    return Link(latency_s, s_per_byte)


def _seconds(values: torch.Tensor, wire: torch.dtype, collective: Collective, lane: Lane) -> float:
    dist.barrier()
    begun = time.perf_counter()
    all_reduce(values, wire, collective, lane).wait()
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
