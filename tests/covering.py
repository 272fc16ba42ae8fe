"""Few cases that together try every pair of choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value from each axis; any two values of two axes meet in one of them.

    Greedy, and the same at every call: a row begins with the first pair that is still missing, and takes from every
    other axis what brings most missing pairs, of equals the value that has been taken least.
    """
    missing = {
        ((one, a), (other, b)): None
        for one, other in combinations(range(len(axes)), 2)
        for a, b in product(range(len(axes[one])), range(len(axes[other])))
    }
    taken = {(axis, n): 0 for axis, values in enumerate(axes) for n in range(len(values))}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in (a for a in range(len(axes)) if a not in row):
            gain = {
                n: sum(tuple(sorted([(axis, n), (a, m)])) in missing for a, m in row.items())
                for n in range(len(axes[axis]))
            }
            row[axis] = min(gain, key=lambda n: (-gain[n], taken[axis, n]))
        for choice in row.items():
            taken[choice] += 1
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[row[axis]] for axis, values in enumerate(axes)))
    return rows
