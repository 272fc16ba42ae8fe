"""Find ranks that keep the others waiting in every step, and warn of them; training continues."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.heartbeat import Heartbeat, published
from imagenet_fast.distributed.rank_info import ranges
from imagenet_fast.errors import warn

_TIMES = 3.0  # the median of all ranks
_LOOK_S = 10.0  # between two comparisons
_SILENT_S = 600.0  # without another warning
_NAMED = 3


class Stragglers:
    """Rank 0's comparison of all ranks' speed, from what they publish.

    It needs no collective and no work of the training thread.
    """

    def __init__(self, store: Store, size: int) -> None:
        """Create it for the ``size`` ranks that publish in ``store``."""
        self._store = store
        self._size = size
        self._before: dict[int, Heartbeat] = {}
        self._since_look_s = 0.0
        self._silent_s = 0.0

    def look(self, passed_s: float) -> None:
        """Warn of ranks that were much slower since the last comparison, ``passed_s`` seconds after the last call.

        Compare every 10 s, and warn at most once in 10 minutes.
        """
        self._since_look_s += passed_s
        self._silent_s -= passed_s
        if self._since_look_s < _LOOK_S:
            return
        self._since_look_s = 0.0
        now = published(self._store, range(self._size))
        sentence = tell_slow(self._before, now)
        self._before = now
        if sentence and self._silent_s <= 0:
            warn(sentence)
            self._silent_s = _SILENT_S


def tell_slow(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> str:
    """Describe in one sentence the ranks whose step took more than three times the median; empty if none.

    Time spent waiting for other ranks does not count.

    Args:
        before: Positions at the last comparison.
        now: Positions at this one.
    """
    own_s = {
        rank: (at.own_s - before[rank].own_s) / (at.steps - before[rank].steps)
        for rank, at in now.items()
        if rank in before and at.steps > before[rank].steps
    }
    if not own_s:
        return ""
    usual_s = median(own_s.values())
    slow = sorted((rank for rank in own_s if own_s[rank] > _TIMES * usual_s), key=lambda rank: -own_s[rank])
    if not slow:
        return ""
    named = ", ".join(f"rank {rank} on {now[rank].host} takes {own_s[rank]:.2g} s" for rank in slow[:_NAMED])
    more = f", as slow are {ranges(sorted(slow[_NAMED:]))}" if slow[_NAMED:] else ""
    return f"{named} for its own part of a step{more}, where the median of all ranks is {usual_s:.2g} s"
