"""Neighbours shared out evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from imagenet_fast.models.split_points import linear_partition


def every_partition(costs: Sequence[float], parts: int) -> Iterator[list[slice]]:
    for ends in combinations(range(1, len(costs)), parts - 1):
        yield [slice(begin, end) for begin, end in zip([0, *ends], [*ends, len(costs)], strict=True)]


def dearest(costs: Sequence[float], runs: list[slice]) -> float:
    return max(sum(costs[run]) for run in runs)


def test_no_other_partition_has_a_cheaper_dearest_run():
    drawn = Random(0)
    for case in range(150):
        costs = [float(drawn.choice((0, 1, drawn.randint(1, 9), drawn.randint(1, 999)))) for _ in range(1 + case % 9)]
        for parts in range(1, len(costs) + 1):
            runs = linear_partition(costs, parts)
            assert [place for run in runs for place in range(len(costs))[run]] == list(range(len(costs)))
            assert len(runs) == parts
            assert all(run.start < run.stop for run in runs)
            assert dearest(costs, runs) == min(dearest(costs, other) for other in every_partition(costs, parts))
