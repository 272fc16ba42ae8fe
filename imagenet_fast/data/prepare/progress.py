"""Progress bars: how much is done, how fast, and how long the rest will take."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


def new_bars() -> Progress:
    """Return bars on stderr that count bytes, and also images for a task with the field ``images``."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=16), DownloadColumn(), TransferSpeedColumn(), _Images(),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip


class _Images(ProgressColumn):
    def render(self, task: Task) -> Text:
        images = task.fields.get("images")
        if not images or not task.elapsed:
            return Text()
        return Text(f"{images / task.elapsed:.0f} images/s")
