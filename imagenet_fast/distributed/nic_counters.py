"""What this host has put on its link to the others, by the kernel's own counter."""

from __future__ import annotations

import math
import os
from pathlib import Path

from imagenet_fast.distributed.rank_info import RankInfo


def sent_bytes(interface: str) -> int | None:
    """Bytes that the calling thread's host has sent by ``interface`` so far, headers among them; None where it has no
    such interface, or a kernel that does not tell."""
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
    """This rank's share of what its host has sent by gloo's interface so far, each rank of a host the same.
    NaN where that is not told, as on a single machine."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    sent = sent_bytes(interface) if interface is not None and place.is_multi_node else None
    return math.nan if sent is None else sent / place.local_size
