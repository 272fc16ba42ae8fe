"""Find which ranks have set a key in a store."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store


def present(store: Store, folder: str, ranks: Sequence[int]) -> bool:
    """Return whether all ``ranks`` have set a key ``folder/rank``, in one request."""
    return store.check([f"{folder}/{rank}" for rank in ranks])


def absent(store: Store, folder: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks without a key ``folder/rank``, by bisection.

    It takes one request if no rank is missing, and a few more for each missing rank.
    """
    if not ranks or present(store, folder, ranks):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return absent(store, folder, ranks[:half]) + absent(store, folder, ranks[half:])
