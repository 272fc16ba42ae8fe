"""How long one of many equal collectives takes, in the manner of nccl-tests; without torch, so for MPI's ranks too."""

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
    """Seconds, and bytes that this host has put on its link (0 unless ``counted``), of one of ``times`` calls of
    ``once`` between two readings of the clock. Every rank must call it alike.

    A fifth as many, at least one, come before and are not timed: they touch fresh memory, open connections and empty a
    shaped link's token bucket, which carries a quarter of a MiB at once. ``drain`` waits for what ``once`` has only
    queued, as on a GPU.
    """
    drain = drain or _nothing
    for _ in range(max(1, times // 5)):
        once()
    drain()
    barrier()
    before = sent_bytes() if counted else 0
    barrier()  # the counter is the host's: none of its ranks sends before all have read it
    begun = time.perf_counter()
    for _ in range(times):
        once()
    drain()
    seconds = time.perf_counter() - begun
    barrier()
    return seconds / times, ((sent_bytes() if counted else 0) - before) / times


def _nothing() -> None:
    """Nothing is queued."""
