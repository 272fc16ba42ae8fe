"""What the kernel says that this host has sent."""

from __future__ import annotations

import math
import os
import socket

import pytest

from imagenet_fast.distributed.network import link_bytes, sent_bytes
from imagenet_fast.distributed.ranks import RankInfo


def test_what_is_sent_by_an_interface_is_counted():
    before = sent_bytes("lo")
    if before is None and "CI" not in os.environ:
        pytest.skip("this kernel does not tell, or has another loopback interface")
    assert before is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), ("127.0.0.1", 9))
    after = sent_bytes("lo")
    assert after is not None
    assert after - before >= 10_000
    assert sent_bytes("l") is sent_bytes("lo0") is sent_bytes("") is None


@pytest.mark.parametrize(
    ("interface", "place", "told"),
    [
        ("lo", RankInfo(0, 4, 0, 2), True),
        ("lo", RankInfo(1, 2, 1, 2), False),  # a single node: gloo's interface carries nothing to others
        *((interface, RankInfo(0, 4, 0, 2), False) for interface in ("nosuch0", "lo,eth0", None)),
    ],
)
def test_a_rank_counts_its_share_of_what_its_host_sends_to_others(
    interface: str | None, place: RankInfo, told: bool, monkeypatch: pytest.MonkeyPatch
):
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    before = sent_bytes("lo")
    share, after = link_bytes(place), sent_bytes("lo")
    if not told:
        assert math.isnan(share)
    elif before is not None or "CI" in os.environ:
        assert before is not None
        assert after is not None
        assert before / 2 <= share <= after / 2
