"""Random user loops: see ``tests.sync.fuzz``, which takes any number of seeds."""

from __future__ import annotations

import pytest

from tests.conftest import tiers
from tests.ranks import run
from tests.sync.fuzz import Case, are_finite, describe, failure_of
from tests.sync.fuzz_loops import ENGINES
from tests.sync.fuzz_programs import program_of


@pytest.mark.parametrize("engine", ["hybrid", "dear int8", "sparse hybrid"])
def test_fuzzed_loop(engine: str):
    check(1, 2, engine)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.ci if n < 20 else pytest.mark.weekly) for n in range(300)]
)
def test_many_fuzzed_loops(seed: int):
    """Each under four engines in turn, so that every engine sees four programs in `ci`."""
    engines = list(ENGINES)
    for turn in range(4 * seed, 4 * seed + 4):
        check(seed, 2 + seed % (2 if seed < 20 else 3), engines[turn % len(engines)])


def check(seed: int, ranks: int, engine: str) -> None:
    case = Case(program_of(seed, ranks), engine)
    if (failure := failure_of(case)) is not None:
        pytest.fail(describe(case, failure), pytrace=False)


@pytest.mark.parametrize("seeds", tiers([range(5)], [range(70)]), ids=["few", "many"])
def test_most_fuzzed_loops_come_to_finite_weights_by_hand(seeds: range):
    """Else there is nothing to compare with."""
    finite = run(2, are_finite, [program_of(seed, 2) for seed in seeds])[0]
    assert sum(finite) >= 0.7 * len(finite)
