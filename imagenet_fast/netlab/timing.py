"""Time all-reduces: many between two clock readings, and all kinds in turn, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from imagenet_fast.distributed.network import sent_bytes
from imagenet_fast.netlab.namespaces import INTERFACE

Key = TypeVar("Key", bound=Hashable)
Measurement = TypeVar("Measurement")


@dataclass(frozen=True)
class Block:
    """A block of equal all-reduces on one rank: seconds and bytes on its node's link of one, and their number."""

    latency_s: float
    kernel_bytes: float
    times: int


def bytes_on_link() -> int:
    """Return the bytes that the calling thread's node has sent on its link so far: they tell of a shaped one only."""
    return sent_bytes(INTERFACE) or 0


def time_repetitions(
    once: Callable[[], object], times: int, drain: Callable[[], object] = lambda: None, warm_up: bool = True
) -> Block:
    """Time ``times`` calls of ``once`` between two clock readings, as nccl-tests does; every rank must call it alike.

    Warm-up calls come first and are not timed: a fifth of ``times``, and at least one. They touch fresh memory, open
    connections and empty a shaped link's token bucket, which lets through a quarter of a MiB at once.

    Args:
        once: Runs the collective.
        times: Number of timed calls.
        drain: Waits for work that ``once`` only queues, as on a GPU.
        warm_up: Whether to make the warm-up calls.
    """
    for _ in range(max(1, times // 5) if warm_up else 0):
        once()
    drain()
    dist.barrier()
    before = bytes_on_link()
    dist.barrier()  # the node's ranks share the counter: none sends before all have read it
    begun = time.perf_counter()
    for _ in range(times):
        once()
    drain()
    seconds = time.perf_counter() - begun
    dist.barrier()
    return Block(seconds / times, (bytes_on_link() - before) / times, times)


def in_turns(
    keys: Sequence[Key],
    rounds: int,
    measure: Callable[[Key], Measurement],
    report: Callable[[str, int, int], None],
) -> dict[Key, list[Measurement]]:
    """Measure everything once in each round, so that all are measured under the same noise.

    Args:
        keys: What is measured.
        rounds: Number of rounds; each begins with another of ``keys``.
        measure: Measures one of ``keys``.
        report: Called with the round, the number of measurements that are done, and that of all.

    Returns:
        The measurements of each, by round.
    """
    measured: dict[Key, list[Measurement]] = {key: [] for key in keys}
    for turn in range(rounds):
        begin = turn % len(keys)
        for number, key in enumerate([*keys[begin:], *keys[:begin]]):
            report(f"round {turn + 1} of {rounds}", turn * len(keys) + number, rounds * len(keys))
            measured[key].append(measure(key))
    return measured
