"""What the kernel says that this host has sent."""

from __future__ import annotations

import os
import socket

import pytest

from imagenet_fast.distributed.network import sent_bytes


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
