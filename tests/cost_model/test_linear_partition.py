"""Neighbours shared out evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import get_args

import pytest

from imagenet_fast.cost_model.collectives import RankLayout, message_alignment, slot_alignment, wire_format
from imagenet_fast.cost_model.linear_partition import linear_partition
from imagenet_fast.recipe.engine_table import Wire


def every_partition(costs: Sequence[float], parts: int) -> Iterator[list[slice]]:
    for ends in combinations(range(1, len(costs)), parts - 1):
        yield [slice(begin, end) for begin, end in zip([0, *ends], [*ends, len(costs)], strict=True)]


def dearest(costs: Sequence[float], runs: list[slice]) -> float:
    return max(sum(costs[run]) for run in runs)


def test_no_other_partition_has_a_cheaper_dearest_run():
    random = Random(0)
    for case in range(150):
        costs = [
            float(random.choice((0, 1, random.randint(1, 9), random.randint(1, 999)))) for _ in range(1 + case % 9)
        ]
        for parts in range(1, len(costs) + 1):
            runs = linear_partition(costs, parts)
            assert [place for run in runs for place in range(len(costs))[run]] == list(range(len(costs)))
            assert len(runs) == parts
            assert all(run.start < run.stop for run in runs)
            assert dearest(costs, runs) == min(dearest(costs, other) for other in every_partition(costs, parts))


def test_runs_that_would_be_empty_are_refused():
    for costs, parts in (([], 1), ([1.0], 2), ([1.0, 2.0], 0)):
        with pytest.raises(ValueError, match="cannot divide"):
            linear_partition(costs, parts)


LAYOUTS = [(ranks,) for ranks in (1, 2, 3, 7, 8, 96, 128, 509)] + [(8,) * 16, (8,) * 64, (4, 3), (1,) * 6]


def test_parts_begin_on_16_bytes_on_gpus():
    """Each rank's part of a gradient's place, of a row's and of a column's ranks; beyond 128 ranks it pads too much."""
    for nodes, wire in product(LAYOUTS, get_args(Wire)):
        form, cpus, gpus = wire_format(wire), RankLayout(nodes, on_gpu=False), RankLayout(nodes, on_gpu=True)
        assert slot_alignment(cpus, form) == message_alignment(cpus, form)
        alignment = slot_alignment(gpus, form)
        assert alignment % message_alignment(gpus, form) == 0
        if gpus.size <= 128:
            assert alignment // gpus.size * form.itemsize % 16 == 0
        else:
            assert alignment == message_alignment(gpus, form)
