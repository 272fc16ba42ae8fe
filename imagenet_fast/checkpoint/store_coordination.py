"""Exchange messages between ranks about a checkpoint, through the store they met at.

A thread of each rank writes and reads them with a client of its own, so training neither waits for it nor shares its
connection. A gloo group could send them, but has a socket to every other rank. A gather on the training thread would be
needed at every step, and the last checkpoint would not be complete until the next one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.board import wait_until

_READ = "read"


@dataclass(frozen=True)
class RankReply:
    """Report of a rank to the others: its ``content``, or its ``failure`` and the ``remedy``.

    With a failure, ``content`` is what to do after the remedy.
    """

    content: Any = None
    failure: str = ""
    remedy: str = ""


class Leaving(Exception):
    """This rank gives up the checkpoint, because its training has ended otherwise."""


class RankTimeout(Exception):
    """Messages were not written in time."""

    def __init__(self, missing: Sequence[str]) -> None:
        """Name the ``missing`` keys."""
        super().__init__(f"timed out waiting for the messages {', '.join(missing)}")
        self.missing = missing


class StoreCoordinator:
    """Messages about one checkpoint, among ``ranks`` ranks; reads stop when ``leaving`` is set."""

    def __init__(self, store: Store, ranks: int, leaving: threading.Event) -> None:
        """Use ``store`` for one checkpoint alone."""
        self._store = store
        self._ranks = ranks
        self._leaving = leaving
        self._keys = [_READ]

    def write(self, key: str, reply: RankReply) -> None:
        """Write ``reply`` under ``key``."""
        self._keys.append(key)
        self._store.set(key, json.dumps(asdict(reply)))

    def read(self, keys: Sequence[str], timeout_s: float) -> list[RankReply]:
        """Wait for the messages under ``keys`` and return them.

        Args:
            keys: Keys that other ranks write.
            timeout_s: Longest wait, in seconds.

        Raises:
            RankTimeout: Some are not there in time.
            Leaving: ``leaving`` was set meanwhile.
            DistError: The store is gone.
        """
        self._keys += keys
        if not self._await(lambda: self._store.check([*keys]), timeout_s):
            raise RankTimeout([key for key in keys if not self._store.check([key])])
        return [RankReply(**json.loads(self._store.get(key))) for key in keys]

    def confirm(self) -> None:
        """Tell rank 0 that this rank has read all messages for it."""
        self._store.add(_READ, 1)

    def clear(self, timeout_s: float) -> None:
        """Wait until all ranks have confirmed, and delete the messages; leave them if one does not in time.

        It waits because the store may end with this process.
        """
        if self._await(lambda: self._store.add(_READ, 0) == self._ranks, timeout_s):
            for key in dict.fromkeys(self._keys):
                self._store.delete_key(key)

    def _await(self, come: Callable[[], bool], timeout_s: float) -> bool:
        return wait_until(come, time.monotonic() + timeout_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        if self._leaving.wait(seconds):
            raise Leaving
