"""What ranks write to one another about a checkpoint: letters in the store they met at.

A thread of each rank writes and looks for them with a client of its own, so training neither waits for it nor shares
its connection. A gloo group could carry them, but has a socket to every other rank; a gather on the training thread
would have to be tried at every step, and the last checkpoint would not be complete until there was another one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.25  # between two looks: at first, and when it takes long
_READ = "read"


@dataclass(frozen=True)
class RankReply:
    """Carry what a rank tells the others: its ``content``; or its ``failure``, the ``remedy`` for it and,
    as ``content``, what to do after that."""

    content: Any = None
    failure: str = ""
    remedy: str = ""


class Leaving(Exception):
    """This rank gives up the checkpoint, as its training has ended otherwise."""


class RankTimeout(Exception):
    """Nobody wrote these letters in time."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(f"no letter {', '.join(missing)}")
        self.missing = missing


class StoreCoordinator:
    """About one checkpoint, among ``ranks`` ranks. It looks for letters until ``leaving`` is set."""

    def __init__(self, store: Store, ranks: int, leaving: threading.Event) -> None:
        self._store = store
        self._ranks = ranks
        self._leaving = leaving
        self._keys = [_READ]

    def write(self, key: str, letter: RankReply) -> None:
        self._keys.append(key)
        self._store.set(key, json.dumps(asdict(letter)))

    def read(self, keys: Sequence[str], patience_s: float) -> list[RankReply]:
        """These letters, once all are there. Raises Silence, Leaving, or DistError where the store is gone."""
        self._keys += keys
        if not self._await(lambda: self._store.check([*keys]), patience_s):
            raise RankTimeout([key for key in keys if not self._store.check([key])])
        return [RankReply(**json.loads(self._store.get(key))) for key in keys]

    def confirm(self) -> None:
        """This rank has read all that there is for it."""
        self._store.add(_READ, 1)

    def clear(self, patience_s: float) -> None:
        """Wait until all ranks have confirmed, as the store may end with this process, and take the letters away; where
        one rank does not, leave them."""
        if self._await(lambda: self._store.add(_READ, 0) == self._ranks, patience_s):
            for key in dict.fromkeys(self._keys):
                self._store.delete_key(key)

    def _await(self, come: Callable[[], bool], patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        pause = _FIRST_LOOK_S
        while not come():
            if self._leaving.wait(pause):
                raise Leaving
            if time.monotonic() > deadline:
                return False
            pause = min(1.5 * pause, _LAST_LOOK_S)
        return True
