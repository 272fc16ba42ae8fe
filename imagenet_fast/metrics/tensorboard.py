"""TensorBoard: scalars under their tags, and the recipe as hyper-parameters of the same run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from imagenet_fast.metrics.event import Event
from imagenet_fast.recipe.schema import Recipe

_SCALARS = {"train", "speed", "sync", "data", "precision", "eval"}


class TensorBoard:
    """Writes to ``tb/`` in the run directory. What came after step ``resumed`` is not shown any more."""

    def __init__(self, folder: Path, recipe: Recipe, resumed: int | None = None) -> None:
        purge = None if resumed is None else resumed + 1
        if resumed is not None:
            _date_back(folder / "tb")
        self._folder = folder / "tb"
        self._open(purge)
        # SummaryWriter.add_hparams would open a second, stray run; its three summaries belong in this one.
        flat = dict(_flatten(recipe.model_dump(exclude_none=True)))
        experiment, begin, self._end = hparams(flat, {"eval/top1": 0.0})
        if resumed is None:
            self._add(experiment)
            self._add(begin)

    def write(self, event: Event) -> None:
        if self._file.is_full:
            self._writer.close()
            self._open()
        if event.name == "end" and event.values["status"] in ("reached", "finished"):
            self._add(self._end)  # not earlier: TensorBoard believes the first one, and the run may go on
        if event.name in _SCALARS:
            for tag, value in event.tagged().items():
                self._writer.add_scalar(tag, value, event.step)

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge: int | None = None) -> None:
        self._writer = SummaryWriter(str(self._folder), flush_secs=10, purge_step=purge)
        asynchronous = self._writer._get_file_writer().event_writer._async_writer
        self._file = _UnlessFull(asynchronous._writer)
        asynchronous._writer = asynchronous._worker._record_writer = self._file

    def _add(self, summary: Any) -> None:
        self._writer._get_file_writer().add_summary(summary)


class _UnlessFull:
    """A file of TensorBoard's, written by its thread: where that fails, the file ends there, and the thread does not
    end with a traceback."""

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


def _date_back(folder: Path) -> None:
    """TensorBoard reads files in the order of the seconds in their names: those that are here get earlier ones, all by
    as much, where the clock has been set back since and what is to come would be read before them."""
    dated = []
    for path in folder.glob("events.out.tfevents.*"):
        if name := re.fullmatch(r"(events\.out\.tfevents\.)(\d+)(.*)", path.name, re.DOTALL):
            dated.append((int(name[2]), path, name[1], name[3]))
    ahead = max((seconds for seconds, *_ in dated), default=0) + 1 - int(time.time())
    for seconds, path, start, rest in sorted(dated) if ahead > 0 else ():
        path.rename(path.with_name(f"{start}{seconds - ahead:010d}{rest}"))


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str | float | int | bool]]:
    flat: list[tuple[str, str | float | int | bool]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((prefix + key, value if isinstance(value, str | float | int | bool) else str(value)))
    return flat
