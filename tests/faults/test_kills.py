"""Ranks, launchers and whole jobs that are killed at random moments: the same command goes on to the same bits.

With more than two ranks sums are rounded as messages happen to be cut, which a measurement decides unless a recipe
does. A run goes on with what had been measured before its checkpoint, but one that was killed before the first measures
anew: so engines are told here what to fuse.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.jobs import Victim, kill_at, train

pytestmark = pytest.mark.weekly


@pytest.mark.parametrize(
    ("victims", "engine"),
    [
        (("rank", "all"), ("--sync", "hybrid", "--set", "sync.fuse_mb=1")),
        (("launcher",), ("--sync", "lazy", "--set", "sync.wire=int8")),
        (("all", "rank"), ("--sync", "sparse", "--set", "sync.dense_epochs=0.2", "--set", "sync.ramp_epochs=0.2")),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    victims: tuple[Victim, ...], engine: tuple[str, ...], tmp_path: Path
):
    choice = random.Random(0)
    undisturbed = train(tmp_path / "undisturbed", *engine)
    for victim in victims:
        kill_at(tmp_path / "killed", victim, choice.randint(1, 17), choice.uniform(0, 0.3), choice, *engine)
    assert train(tmp_path / "killed", *engine) == undisturbed
