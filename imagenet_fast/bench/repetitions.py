"""Time one of many equal collectives, as nccl-tests does.

This module does not import torch, so MPI ranks can use it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from imagenet_fast.bench.netns import sent_bytes


def time_repetitions(
    once: Callable[[], object],
    times: int,
    barrier: Callable[[], object],
    drain: Callable[[], object] | None = None,
    counted: bool = False,
) -> tuple[float, float]:
    """Time ``times`` calls of ``once`` between two clock readings; every rank must call it with the same arguments.

    Warm-up calls come first and are not timed: a fifth of ``times``, and at least one. They touch fresh memory, open
    connections and empty a shaped link's token bucket, which lets through a quarter of a MiB at once.

    Args:
        once: Runs the collective.
        times: Number of timed calls.
        barrier: Waits for all ranks.
        drain: Waits for work that ``once`` only queues, as on a GPU; None if it queues nothing.
        counted: Whether to count the bytes on the node's link.

    Returns:
        Seconds per call, and bytes per call that this node sent on its link (0 unless ``counted``).
    """
    drain = drain or _nothing
    for _ in range(max(1, times // 5)):
        once()
    drain()
    barrier()
    before = sent_bytes() if counted else 0
    barrier()  # the node's ranks share the counter: none sends before all have read it
    begun = time.perf_counter()
    for _ in range(times):
        once()
    drain()
    seconds = time.perf_counter() - begun
    barrier()
    return seconds / times, ((sent_bytes() if counted else 0) - before) / times


def _nothing() -> None:
    """Do nothing: nothing is queued."""
