"""Progress bars on stderr: how much is done, and how long the rest will take.

They are shown on a terminal only: nothing is written to pipes and files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rich import progress
from rich.console import Console

Show = Callable[[str, int, int], None]
"""Shows what is being done, how many parts are done, and how many there are."""

_APART_S = 0.2  # between two drawings


def progress_bars(unit: Literal["images", "bytes"]) -> progress.Progress:
    """Return bars that count images, or bytes and their speed."""
    return _bars(*([progress.DownloadColumn(), progress.TransferSpeedColumn()] if unit == "bytes" else []))


@contextmanager
def measurement_bar() -> Iterator[Show]:
    """Show one bar while measuring, and remove it at the end; yield a function that moves it.

    The bar is drawn by that function alone. There is no thread that would disturb what is measured.
    """
    bar = _bars(auto_refresh=False, transient=True, speed_estimate_period=3600)
    task = bar.add_task("starting", total=None)
    drawn = 0.0

    def show(text: str, done: int, total: int) -> None:
        nonlocal drawn
        if refresh := time.monotonic() - drawn >= _APART_S:
            drawn = time.monotonic()
        bar.update(task, description=text, completed=done, total=total, refresh=refresh)

    with bar:
        yield show


def _bars(*counted: progress.ProgressColumn, **settings: Any) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=16),
        *(counted or [progress.MofNCompleteColumn()]),
        progress.TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        **settings,
    )
