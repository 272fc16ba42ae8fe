"""Measure several things in interleaved rounds, and show on a terminal how far that is, without disturbing it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from imagenet_fast.netlab.timing import in_turns

Name = TypeVar("Name", bound=str)
Measurement = TypeVar("Measurement")
Show = Callable[[str, int, int], None]
"""Shows what is being done, how many parts are done, and how many there are."""

_APART_S = 0.2  # between two drawings


@contextmanager
def measurement_bar() -> Iterator[Show]:
    """Show one bar while measuring, and remove it at the end; yield a function that moves it.

    The bar is drawn by that function alone. There is no thread that would disturb what is measured.
    """
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True), disable=not sys.stderr.isatty(),
        auto_refresh=False, transient=True, speed_estimate_period=3600,
    )  # fmt: skip
    task = bar.add_task("starting", total=None)
    drawn = 0.0

    def show(text: str, done: int, total: int) -> None:
        nonlocal drawn
        if refresh := time.monotonic() - drawn >= _APART_S:
            drawn = time.monotonic()
        bar.update(task, description=text, completed=done, total=total, refresh=refresh)

    with bar:
        yield show


def in_rounds(
    names: Sequence[Name], rounds: int, measure: Callable[[Name], Measurement]
) -> dict[Name, list[Measurement]]:
    """Measure everything as ``in_turns`` does, and show how far that is."""
    with measurement_bar() as show:
        return in_turns(names, rounds, measure, show)


def median_ratio(times: Sequence[float], to: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of ``times`` to ``to``: a slow phase of the node slows both."""
    return median(ours / theirs for ours, theirs in zip(times, to, strict=True))
