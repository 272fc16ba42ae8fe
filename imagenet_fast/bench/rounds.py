"""Measure several things in interleaved rounds, so that all are measured under the same noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from imagenet_fast.bench.progress import measurement_bar

Name = TypeVar("Name", bound=str)
Measurement = TypeVar("Measurement")


def in_rounds(
    names: Sequence[Name], rounds: int, measure: Callable[[Name], Measurement], called: str = "round"
) -> dict[Name, list[Measurement]]:
    """Measure everything once in each round, in turns from the first and from the last, and show how far that is.

    Args:
        names: What is measured.
        rounds: Number of rounds.
        measure: Measures one of ``names``.
        called: Word for a round.

    Returns:
        The measurements of each, by round.
    """
    measured: dict[Name, list[Measurement]] = {name: [] for name in names}
    with measurement_bar() as show:
        for turn in range(rounds):
            for number, name in enumerate(names if turn % 2 == 0 else reversed(names)):
                text = f"{name}, {called} {turn + 1} of {rounds}"
                show(text, turn * len(names) + number, rounds * len(names))
                measured[name].append(measure(name))
    return measured


def median_ratio(times: Sequence[float], to: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of ``times`` to ``to``: a slow phase of the node slows both."""
    return median(ours / theirs for ours, theirs in zip(times, to, strict=True))
