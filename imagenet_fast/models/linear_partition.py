"""Neighbours divided evenly into groups: an exact solution of the linear partition problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def linear_partition(costs: Sequence[float], parts: int) -> list[slice]:
    """Divide ``costs`` into ``parts`` groups of neighbours, none empty, so that the dearest group costs least.

    Dynamic programming over where the last group begins (Skiena, The Algorithm Design Manual, "The Partition Problem").

    Args:
        costs: Costs in order, none negative.
        parts: Number of groups.

    Raises:
        ValueError: There are more parts than costs, or fewer than one part.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"cannot divide {count} costs into {parts} groups that are not empty")
    sums = list(accumulate(costs, initial=0.0))
    least = dict(enumerate(sums))  # by number of costs: cost of the dearest group so far
    begins: list[dict[int, int]] = []  # of each further group, by its end
    for run in range(1, parts):
        ways = {
            end: min((max(least[begin], sums[end] - sums[begin]), begin) for begin in range(run, end))
            for end in range(run + 1, count + 1)
        }
        least = {end: dearest for end, (dearest, _) in ways.items()}
        begins.append({end: begin for end, (_, begin) in ways.items()})
    ends = [count]
    for begin_of in reversed(begins):
        ends.append(begin_of[ends[-1]])
    return [slice(begin, end) for begin, end in zip([0, *reversed(ends[1:])], reversed(ends), strict=True)]
