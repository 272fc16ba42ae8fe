"""Show on a terminal how far a measurement is, without disturbing it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
