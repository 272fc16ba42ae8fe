"""Progress bars on stderr: how much is done, how fast, and how long the rest will take."""

from __future__ import annotations

from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


def progress_bars(unit: Literal["images", "bytes"]) -> Progress:
    """Return bars that count images, or bytes and, for a task with the field ``images``, also images."""
    counted = [MofNCompleteColumn()] if unit == "images" else [DownloadColumn(), TransferSpeedColumn()]
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=16), *counted, _Rate(unit == "images"),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip


class _Rate(ProgressColumn):
    """Images a second."""

    def __init__(self, counts_images: bool) -> None:
        super().__init__()
        self._counts_images = counts_images

    def render(self, task: Task) -> Text:
        images = task.completed if self._counts_images else task.fields.get("images")
        return Text(f"{images / task.elapsed:.0f} images/s" if images and task.elapsed else "")
