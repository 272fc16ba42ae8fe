"""Random user loops: see ``tests.sync.fuzz``, which takes any number of seeds."""

from __future__ import annotations

import pytest

from tests.conftest import tiers
from tests.ranks import run
from tests.sync.fuzz import Case, are_finite, describe, failure_of, shrink
from tests.sync.fuzz_loops import ENGINES
from tests.sync.fuzz_programs import program_of


@pytest.mark.parametrize("engine", ["hybrid", "dear fp8", "sparse hybrid"])
def test_fuzzed_loop(engine: str):
    check(1, 2, engine)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(20))
def test_many_fuzzed_loops(seed: int):
    """Each under some engines in turn, so that every engine sees four programs."""
    for engine in in_turn(seed, 4):
        check(seed, 2 + seed % 2, engine)


@pytest.mark.weekly
@pytest.mark.parametrize("seed", range(20, 300))
def test_hundreds_of_fuzzed_loops(seed: int):
    for engine in in_turn(seed, 4):
        check(seed, 2 + seed % 3, engine)


def in_turn(seed: int, count: int) -> list[str]:
    engines = list(ENGINES)
    return [engines[(count * seed + turn) % len(engines)] for turn in range(count)]


def check(seed: int, ranks: int, engine: str) -> None:
    case = Case(program_of(seed, ranks), engine)
    if (failure := failure_of(case)) is not None:
        pytest.fail(describe(*shrink(case, failure, seconds=20)), pytrace=False)


@pytest.mark.parametrize("seeds", tiers([range(5)], [range(70)]), ids=["few", "many"])
def test_most_fuzzed_loops_come_to_finite_weights_by_hand(seeds: range):
    """Else there is nothing to compare with."""
    finite = run(2, are_finite, [program_of(seed, 2) for seed in seeds])[0]
    assert sum(finite) >= 0.7 * len(finite)
