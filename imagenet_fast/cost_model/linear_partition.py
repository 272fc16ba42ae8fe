"""Neighbours shared out evenly: the linear partition problem, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def linear_partition(costs: Sequence[float], parts: int) -> list[slice]:
    """``costs`` (none negative) in ``parts`` runs of neighbours, none empty, of which the dearest costs least.

    Dynamic programming over where the last run begins (Skiena, The Algorithm Design Manual, "The Partition Problem").
    Raises ValueError where there are more parts than costs.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} costs cannot be shared out among {parts} runs that are not empty")
    sums = list(accumulate(costs, initial=0.0))
    least = dict(enumerate(sums))  # by how many costs: what the dearest of the runs so far comes to
    begins: list[dict[int, int]] = []  # of each further run, by its end
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
