"""Random user loops: see ``tests.sync.fuzz``, which takes any number of seeds."""

from __future__ import annotations

import pytest

from tests.sync.fuzz import Case, cases_of, describe, run_all, shrink
from tests.sync.fuzz_loops import ENGINES

FEW = (
    "allreduce", "ring", "lazy", "hybrid", "dear", "auto", "hybrid bf16", "lazy int8", "dear fp8", "powersgd",
    "sparse hybrid",
)  # fmt: skip
"""One of each kind and wire: what the suite has time for."""


def test_fuzzed_loops_train_as_by_hand():
    _check(cases_of(range(10), 2, FEW), 2)


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(10, 110)), (3, range(30))])
def test_many_fuzzed_loops_train_as_by_hand(ranks: int, seeds: range):
    """Each by some engines in turn, so that every engine sees dozens of programs."""
    engines = list(ENGINES)
    cases = []
    for seed in seeds:
        cases += cases_of([seed], ranks, [engines[(4 * seed + turn) % len(engines)] for turn in range(4)])
    _check(cases, ranks)


def _check(cases: list[Case], ranks: int) -> None:
    for case, failure in run_all(cases, ranks):
        if failure is not None:
            pytest.fail(describe(*shrink(case, failure, ranks, seconds=20)), pytrace=False)
