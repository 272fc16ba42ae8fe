"""The time that a step loses because it waits for the slowest of many ranks."""

from __future__ import annotations

import math
from functools import cache

_STEPS = 4000
_FAR = 10.0  # standard deviations beyond which a normal draw does not lie


@cache
def expected_max(ranks: int) -> float:
    """Return the mean of the largest of ``ranks`` draws from the standard normal distribution.

    It is the integral of 1 - F(x)^P over positive x, less that of F(x)^P over negative x.
    """
    width = 2 * _FAR / _STEPS
    total = 0.0
    for step in range(_STEPS):
        x = -_FAR + (step + 0.5) * width
        below = (math.erfc(-x / math.sqrt(2)) / 2) ** ranks
        total += width * (1 - below if x > 0 else -below)
    return total


def straggling(sigma: float, ranks: int) -> float:
    """Return the factor on a step's compute: all ranks wait for the slowest, whose time is 1 + sigma x the maximum.

    Each rank's time is normal around 1 with the standard deviation ``sigma``, drawn anew in each step. Deferred
    updates hide none of this wait: no rank can begin step n + 2 before the slowest has ended step n.
    """
    return 1.0 if ranks == 1 else 1 + sigma * expected_max(ranks)
