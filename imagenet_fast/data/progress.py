"""Progress bars on stderr: how much is done, how fast, and how long the rest will take.

They are shown on a terminal only: nothing is written to pipes and files.
"""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def progress_bars(unit: Literal["images", "bytes"]) -> Progress:
    """Return bars that count images or bytes."""
    counted = [MofNCompleteColumn()] if unit == "images" else [DownloadColumn(), TransferSpeedColumn()]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        *counted,
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
