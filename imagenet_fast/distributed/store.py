"""Keys that ranks leave for one another in a store, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # launchers import this module, and torch takes seconds
    from torch._C._distributed_c10d import Store


def wait_until(
    come: Callable[[], bool], deadline: float, look_s: float, longest_s: float | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:  # fmt: skip
    """Call ``come`` until it returns true, and return whether it did before ``deadline``.

    Args:
        come: The condition; may raise, to wait no longer.
        deadline: End of the wait, by ``time.monotonic``.
        look_s: Seconds between two looks.
        longest_s: Look less and less often, down to once in so many seconds; None: always every ``look_s``.
        sleep: Waits for some seconds; may raise, to wait no longer.
    """
    while not come():
        if time.monotonic() > deadline:
            return False
        sleep(look_s)
        look_s = min(1.5 * look_s, longest_s or look_s)
    return True


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
