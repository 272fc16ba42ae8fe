"""A board of messages in a store of torch.distributed, which processes leave for one another, and waiting for them.

Nodes and ranks meet over it, agree on a failure or a stop, publish their positions, and write checkpoints together.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # launchers import this module, and torch takes seconds
    from torch._C._distributed_c10d import Store

_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.25  # seconds between two looks: at first, and when it takes long
_Found = TypeVar("_Found")


def wait_until(look: Callable[[], _Found], deadline: float, pause: Callable[[float], object] = time.sleep) -> _Found:
    """Call ``look``, less and less often, until it returns something true or ``deadline`` has passed; return the last.

    Args:
        look: The condition; may raise, to wait no longer.
        deadline: End of the wait, by ``time.monotonic``. It looks at least once.
        pause: Waits for some seconds; may do something else meanwhile, such as publish a heartbeat, or raise.
    """
    look_s = _FIRST_LOOK_S
    while not (found := look()) and time.monotonic() < deadline:
        pause(look_s)
        look_s = min(1.5 * look_s, _LAST_LOOK_S)
    return found


def call_within(seconds: float, function: Callable[[], _Found]) -> _Found | None:
    """Return what ``function`` does; None if it takes longer: a store whose node is gone, or a disk, may be slow."""
    done: list[_Found] = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads may be started
        return function()
    thread.join(seconds)
    return done[0] if done else None


_clients: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()
"""The client beside each store that is in use."""


def background_client(store: Store) -> Store:
    """Return a client of ``store`` for threads beside the one that may be blocked in it; they share it.

    Whoever holds the store of all ranks has a connection to each client. On a board requests are short.
    """
    if store not in _clients:
        _clients[store] = store.clone()
    return _clients[store]


class Board:
    """The messages in one part of a store, by key. A message is anything that JSON can hold, except null.

    Each request raises ``torch.distributed.DistError`` if the process that holds the store has ended.
    """

    def __init__(self, store: Store, part: str = "", pause: Callable[[float], object] = time.sleep) -> None:
        """Use the keys of ``store`` that begin with ``part/``.

        Args:
            store: Where the messages are. A thread needs another client, as ``background_client``, if the main one
                may be blocked.
            part: Name of the part; empty for the whole store.
            pause: What to do between two looks for a message, as in ``wait_until``.
        """
        self._store = store
        self._prefix = f"{part}/" if part else ""
        self.pause = pause

    def post(self, key: str, message: Any) -> None:
        """Leave ``message`` under ``key``, in place of an earlier one."""
        self._store.set(self._prefix + key, json.dumps(message))

    def first(self, key: str, message: Any) -> Any:
        """Leave ``message`` under ``key`` unless there is one; return the one that is there now, whoever left it."""
        return json.loads(self._store.compare_set(self._prefix + key, "", json.dumps(message)))

    def read(self, key: str, deadline: float = 0.0) -> Any:
        """Return the message under ``key``, once there is one; None if there is none by ``deadline``."""
        there = wait_until(lambda: self._store.check([self._prefix + key]), deadline, self.pause)
        return json.loads(self._store.get(self._prefix + key)) if there else None

    def gather(self, folder: str, numbers: Sequence[int], deadline: float = 0.0) -> dict[int, Any]:
        """Return the messages under the keys ``folder/number``, once all are there.

        Those that are not there by ``deadline`` are left out. It takes two requests if none is missing, and a few more
        for each missing one.
        """
        keys = [f"{self._prefix}{folder}/{number}" for number in numbers]
        all_there = wait_until(lambda: not keys or self._store.check(keys), deadline, self.pause)
        missing = set() if all_there else set(self._absent(keys))
        there = {number: key for number, key in zip(numbers, keys, strict=True) if key not in missing}
        texts = self._store.multi_get([*there.values()]) if there else []
        return {number: json.loads(text) for number, text in zip(there, texts, strict=True)}

    def count(self, key: str) -> int:
        """Count up the number under ``key``, which begins at 0, and return it. It is no message."""
        return self._store.add(self._prefix + key, 1)

    def remove(self, *keys: str) -> None:
        """Remove the messages under ``keys``, where there are any."""
        for key in keys:
            self._store.delete_key(self._prefix + key)

    def _absent(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that are not in the store, by bisection."""
        if self._store.check([*keys]):
            return []
        if len(keys) == 1:
            return [*keys]
        half = len(keys) // 2
        return self._absent(keys[:half]) + self._absent(keys[half:])
