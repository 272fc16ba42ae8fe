"""Programs of disturbances with real jobs: those with a name, and a few random ones."""

from __future__ import annotations

import re
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1

import pytest

from tests.faults.fuzzing import play
from tests.faults.programs import Command, Disturbance, Program, Send, draw_program

pytestmark = pytest.mark.weekly


NAMED: dict[str, tuple[str, list[tuple[int, float, Disturbance]], list[int]]] = {
    "whoever is told to stop, all save": ("lazy", [
        (2, 0, Send(SIGINT, "launcher")), (4, 0, Send(SIGTERM, "launcher")), (7, 0, Send(SIGUSR1, "rank 1")),
    ], [4, 4, 4]),
    "Ctrl-C in a terminal is heard by all": ("dear", [(5, 0, Send(SIGINT, "all"))], [4]),
    **{
        f"{number.name} at the start": ("lazy", [(0, at, Send(number, "launcher")) for at in times], [4, 4])
        for number, times in ((SIGINT, (2.0, 5.0)), (SIGTERM, (3.0, 6.0)), (SIGUSR1, (4.0, 7.0)))
    },
    "a rank, then all are killed": (
        "hybrid, three ranks", [(5, 0.1, Send(SIGKILL, "rank 1")), (8, 0.2, Send(SIGKILL, "all"))], [1, -9]
    ),
    "the launcher is killed": ("lazy int8, three ranks", [(4, 0.2, Send(SIGKILL, "launcher"))], [-9]),
    "all, then a rank are killed": (
        "sparse, three ranks", [(3, 0.1, Send(SIGKILL, "all")), (7, 0.1, Send(SIGKILL, "rank 0"))], [-9, 1]
    ),
}  # fmt: skip
"""What is trained; after which step and how many seconds later what happens to each launch, and how that then ends.

With three ranks sums are rounded as messages happen to be cut, which is measured unless a recipe says it. A run goes on
with what had been measured before its checkpoint, but one that was killed before the first measures anew.
"""


@pytest.mark.parametrize("name", NAMED)
def test_a_disturbed_run_ends_with_the_bits_of_one_that_was_not(name: str, tmp_path: Path):
    setting, disturbances, codes = NAMED[name]
    commands = tuple(Command(step, delay, what, ()) for step, delay, what in disturbances)
    played = play(tmp_path, Program(name, setting, commands, again=True))
    assert played.faults == [], played.happened
    ended = [int(code) for code in re.findall(r"exit code (-?\d+)", " ".join(played.happened))]
    assert ended == [*codes, 0, 0], played.happened


@pytest.mark.parametrize("seed", ["1/1", "1/3", "2/3"])
def test_a_fuzzed_job_ends_with_the_same_bytes_or_a_sentence(seed: str, tmp_path: Path):
    program = draw_program(seed)
    played = play(tmp_path, program)
    assert played.faults == [], (program, played.happened)
