"""TensorBoard: scalars under their tags, and the recipe as hyper-parameters of the same run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from imagenet_fast.metrics.event import Event
from imagenet_fast.recipe.schema import Recipe

_SCALARS = {"train", "speed", "sync", "data", "precision", "eval"}
"""Events whose values are scalars."""


class TensorBoard:
    """A sink that writes to ``tb/`` in the run directory."""

    def __init__(self, folder: Path, recipe: Recipe, resumed: int | None = None) -> None:
        """Open the event file.

        Args:
            folder: The run directory.
            recipe: The recipe, shown as hyper-parameters.
            resumed: The step from which the run resumes; later values are no longer shown. None: the run begins.

        Raises:
            OSError: No file can be created in ``tb/``.
        """
        purge = None if resumed is None else resumed + 1
        if resumed is not None:
            _date_back(folder / "tb")
        self._folder = folder / "tb"
        _check_writable(self._folder)
        self._open(purge)
        # SummaryWriter.add_hparams would create a second run, so its three summaries are added here.
        flat = dict(_flatten(recipe.model_dump(exclude_none=True)))
        experiment, begin, self._end = hparams(flat, {"eval/top1": 0.0})
        if resumed is None:
            self._add(experiment)
            self._add(begin)

    def write(self, event: Event) -> None:
        """Write the event's scalars; begin a new file if the disk of the last one was full."""
        if self._file.is_full:
            self._writer.close()
            self._open()
        if event.name == "end" and event.values["status"] in ("reached", "finished"):
            self._add(self._end)  # only at the end: TensorBoard uses the first one, and the run may resume
        if event.name in _SCALARS:
            for tag, value in event.tagged().items():
                self._writer.add_scalar(tag, value, event.step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _open(self, purge: int | None = None) -> None:
        """Open a new event file; values of step ``purge`` and later are no longer shown."""
        self._writer = SummaryWriter(str(self._folder), flush_secs=10, purge_step=purge)
        asynchronous = self._writer._get_file_writer().event_writer._async_writer
        self._file = _UnlessFull(asynchronous._writer)
        asynchronous._writer = asynchronous._worker._record_writer = self._file

    def _add(self, summary: Any) -> None:
        self._writer._get_file_writer().add_summary(summary)


class _UnlessFull:
    """A file object for TensorBoard's writer thread that survives a full disk.

    After a failed write the file ends there, and the thread does not end with a traceback.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.is_full = False

    def write(self, data: bytes) -> None:
        self._attempt(lambda: self._file.write(data))

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        self._attempt(self._file.close)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            if not self.is_full:
                action()
        except OSError:
            self.is_full = True


def _check_writable(folder: Path) -> None:
    """Create ``folder`` and a file in it; TensorBoard would do so in a thread, which ends with a traceback.

    Raises:
        OSError: It failed; its file name is the folder's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _date_back(folder: Path) -> None:
    """Rename event files so that their times lie in the past, if the clock was set back since they were written.

    TensorBoard reads files in the order of the seconds in their names, and would read new files before these. All files
    are moved by the same number of seconds.
    """
    dated = []
    for path in folder.glob("events.out.tfevents.*"):
        if name := re.fullmatch(r"(events\.out\.tfevents\.)(\d+)(.*)", path.name, re.DOTALL):
            dated.append((int(name[2]), path, name[1], name[3]))
    ahead = max((seconds for seconds, *_ in dated), default=0) + 1 - int(time.time())
    for seconds, path, start, rest in sorted(dated) if ahead > 0 else ():
        path.rename(path.with_name(f"{start}{seconds - ahead:010d}{rest}"))


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str | float | int | bool]]:
    """Return the values of nested tables by dotted key, as types that TensorBoard accepts."""
    flat: list[tuple[str, str | float | int | bool]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((prefix + key, value if isinstance(value, str | float | int | bool) else str(value)))
    return flat
