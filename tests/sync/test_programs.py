"""Named loops of users under every engine: as by hand, or refused in words (see ``tests.sync.fuzz``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sync.fuzz import Case, describe, failure_of
from tests.sync.fuzz_loops import ENGINES, can_carry_out
from tests.sync.fuzz_programs import Program
from tests.sync.programs import PROGRAMS


def in_turn(number: int, program: Program) -> str:
    """The engine of a program's case that `ci` always has; every other program's is of the first tier."""
    engines = [engine for engine in (*ENGINES, "allreduce", "ring", "auto") if can_carry_out(program, engine)]
    return engines[number // 2 % len(engines)]


def marks(number: int, program: Program, engine: str) -> Iterator[pytest.MarkDecorator]:
    if engine != in_turn(number, program):
        yield pytest.mark.ci if (list(ENGINES).index(engine) + number) % 12 == 0 else pytest.mark.weekly
    elif number % 2 == 1:
        yield pytest.mark.ci


def cases() -> Iterator[object]:
    for number, program in enumerate(PROGRAMS):
        for engine in (engine for engine in ENGINES if can_carry_out(program, engine)):
            found = tuple(marks(number, program, engine))
            yield pytest.param(Case(program, engine), id=f"{program.name}-{engine}", marks=found)


@pytest.mark.parametrize("case", list(cases()))
def test_program(case: Case):
    if (failure := failure_of(case)) is not None:
        pytest.fail(describe(case, failure), pytrace=False)


def test_names_are_unique_and_every_kind_of_engine_has_four_programs_in_the_first_tier():
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    chosen = Counter(ENGINES[in_turn(2 * half, program)].kind for half, program in enumerate(PROGRAMS[::2]))
    assert min(chosen[settings.kind] for settings in ENGINES.values()) >= 4
