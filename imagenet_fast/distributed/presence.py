"""Which ranks have left a key of theirs in a store."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store


def present(store: Store, folder: str, ranks: Sequence[int]) -> bool:
    """Whether there is a key ``folder/rank`` of all of them; one request."""
    return store.check([f"{folder}/{rank}" for rank in ranks])


def absent(store: Store, folder: str, ranks: Sequence[int]) -> list[int]:
    """Those without, by halves: one request where all are there, a few more for each other."""
    if not ranks or present(store, folder, ranks):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return absent(store, folder, ranks[:half]) + absent(store, folder, ranks[half:])
