"""Bytes that this node has sent on its network interface, from the kernel's counter."""

from __future__ import annotations

import math
import os
from pathlib import Path

from imagenet_fast.distributed.rank_info import RankInfo


def sent_bytes(interface: str) -> int | None:
    """Return the bytes sent through ``interface`` so far, headers included, in the calling thread's network namespace.

    Return None if there is no such interface, or the kernel does not report it.
    """
    try:
        lines = Path("/proc/thread-self/net/dev").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return None


def link_bytes(place: RankInfo) -> float:
    """Return this rank's share of the bytes that its node has sent through gloo's interface so far.

    All ranks of a node have the same share. Return NaN if the count is not available, as on a single node.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    sent = sent_bytes(interface) if interface is not None and place.is_multi_node else None
    return math.nan if sent is None else sent / place.local_size
