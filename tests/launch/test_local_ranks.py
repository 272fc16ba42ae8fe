"""Ranks of one node: as many as it can hold."""

from __future__ import annotations

import pytest

from imagenet_fast.errors import UserError
from imagenet_fast.launch import rendezvous
from imagenet_fast.launch.rendezvous import local_ranks


def test_ranks_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "usable_memory", lambda: 2 * 2**30)
    assert local_ranks(13) == 13
    with pytest.raises(UserError, match=r"--nproc 10000 takes more than 1465 GiB of memory.*give at most 13"):
        local_ranks(10_000)
