"""Progress bars on stderr: how much is done, how fast, and how long the rest will take.

They are shown on a terminal only: nothing is written to pipes and files.
"""

from __future__ import annotations

import sys
from typing import Literal

from rich import progress
from rich.console import Console


def progress_bars(unit: Literal["images", "bytes"]) -> progress.Progress:
    """Return bars that count images or bytes."""
    counted = (
        [progress.MofNCompleteColumn()]
        if unit == "images"
        else [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    )
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=16),
        *counted,
        progress.TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
