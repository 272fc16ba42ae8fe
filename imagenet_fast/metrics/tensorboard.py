"""Event files for TensorBoard: curves, a layout of charts, and a row in the table of hyper-parameters.

They lie in the run directory itself, so ``tensorboard --logdir runs`` calls each run by its name. A run that resumes
writes its curves again from ``events.jsonl``, and removes the older event files, those in ``tb/`` of earlier versions
too.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import custom_scalars

from imagenet_fast.metrics.event import Event
from imagenet_fast.metrics.json_io import read_events
from imagenet_fast.metrics.report import EVENT_FILES, PastRun
from imagenet_fast.recipe.job import Job, flat_tables, recipe_tables

TOP1_BY_SECOND = "eval/top1_by_second"
"""Tag of top-1 over the run time: its steps are seconds."""

_SCALARS = {"train", "speed", "sync", "data", "precision", "eval"}
"""Events whose values are scalars."""

_NO_CURVES = {"train/epoch", "eval/epoch", "eval/images", "eval/eval_s", "eval/train_s"}
"""Tags that are left out, since no run is judged by them."""

_CHARTS = {
    "top-1 (%) by second of the run": TOP1_BY_SECOND,
    "training loss": "train/loss",
    "learning rate": "train/lr",
    "images a second": "speed/images_per_s",
    "exposed sync (ms a step)": "sync/exposed_ms",
    "data wait (% of the time)": "data/wait_pct",
}
"""Charts of the Custom Scalars tab: the tag by title. They fill rows of two or three."""

_DECIDING = (
    "data.loader", "epochs", "global_batch", "model.kind", "optim.kind", "optim.lr", "precision.kind", "seed",
    "sync.kind", "sync.wire",
)  # fmt: skip
"""Keys of a recipe that are always among the hyper-parameters."""

_STATUS = {"reached": STATUS_SUCCESS, "finished": STATUS_SUCCESS, "failed": STATUS_FAILURE}
"""TensorBoard's status of a run that has ended; it is unknown while a run trains, and if it was stopped."""


class TensorBoard:
    """A sink that writes an event file to the run directory."""

    def __init__(self, job: Job, resumed: int | None = None) -> None:
        """Open a new event file.

        Args:
            job: The run: its directory, and the recipe that is shown as hyper-parameters.
            resumed: The step from which the run resumes; ``events.jsonl`` ends there. None: the run begins.
        """
        self._folder = job.folder
        self._timed = PastRun(job.folder, None, [])
        self._best = -math.inf
        past = [] if resumed is None else [_read_back(event) for event in read_events(job.folder)]
        replaced = [] if resumed is None else [*job.folder.glob(EVENT_FILES), *job.folder.glob(f"tb/{EVENT_FILES}")]
        self._begun = time.time() - (past[-1].run_s if past else 0.0)
        self._open()
        # SummaryWriter.add_hparams would create a second run. Without its third summary, of the experiment, TensorBoard
        # makes the table's columns from all runs, those that differ first.
        info = SessionStartInfo(start_time_secs=self._begun)
        for key, value in hyperparameters(job).items():
            match value:
                case str():
                    # a file's name may have bytes that the locale could not decode
                    info.hparams[key].string_value = os.fsencode(value).decode(errors="replace")
                case _:
                    info.hparams[key].number_value = value
        self._add_session(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))
        charts = {title: ["Multiline", [f"^{tag}$"]] for title, tag in _CHARTS.items()}
        self._writer._get_file_writer().add_summary(custom_scalars({"Overview": charts}))
        for event in past:
            self.write(event)
        self._writer.flush()
        if not self._file.is_full:
            _remove(replaced)

    def write(self, event: Event) -> None:
        """Write the event's scalars; begin a new file if the disk of the last one was full."""
        if self._file.is_full:
            self._writer.close()
            self._open()
        if event.name in ("run", "speed"):
            self._timed.events.append({"event": event.name, "step": event.step, **event.values})
        if event.name == "end" and (status := _STATUS.get(event.values["status"])) is not None:
            info = SessionEndInfo(status=status, end_time_secs=self._begun + event.run_s)
            self._add_session(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))
        for tag, value, step in self._scalars(event):
            self._writer.add_scalar(tag, math.nan if value is None else value, step, self._begun + event.run_s)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _scalars(self, event: Event) -> Iterator[tuple[str, Any, int]]:
        """Yield tag, value and step of each scalar of an event.

        Those in ``compare`` are what runs are compared by. TensorBoard's table of hyper-parameters shows the last value
        of each tag, and by default of the first five in alphabetical order.
        """
        if event.name in _SCALARS:
            for tag, value in event.tagged().items():
                if tag not in _NO_CURVES:
                    yield tag, value, event.step
        match event.name:
            case "eval":
                top1 = event.values["top1"]
                yield TOP1_BY_SECOND, top1, round(event.run_s)
                if top1 is not None:
                    self._best = max(self._best, top1)
                    yield "compare/top1_best", self._best, event.step
                if (step_s := self._timed.step_s) is not None:
                    yield "compare/step_s", step_s, event.step
            case "end" if event.values["time_to_accuracy_s"] is not None:
                yield "compare/time_to_accuracy_s", event.values["time_to_accuracy_s"], event.step

    def _open(self) -> None:
        """Open a new event file."""
        self._writer = SummaryWriter(str(self._folder), flush_secs=10)
        asynchronous = self._writer._get_file_writer().event_writer._async_writer
        self._file = _UnlessFull(asynchronous._writer)
        asynchronous._writer = asynchronous._worker._record_writer = self._file

    def _add_session(self, tag: str, data: HParamsPluginData) -> None:
        """Write a part of the run's row in the table of hyper-parameters."""
        about = metadata.create_summary_metadata(data)
        summary = Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
        self._writer._get_file_writer().add_summary(summary)


def hyperparameters(job: Job) -> dict[str, str | float]:
    """Return what decides the result of a run, and what its user has set, by key of the recipe.

    ``recipe``, ``layout``, ``world_size`` and ``micro_batch`` are those of the run. The seed is text, as it is a label.
    """
    shown: dict[str, str | float] = {
        "recipe": job.name,
        "layout": job.recipe.parallel.layout(job.batching.ranks),
        "world_size": job.batching.ranks,
        "micro_batch": job.batching.micro_batch,
    }
    for key, value in flat_tables(recipe_tables(job.recipe)).items():
        if key in _DECIDING or any(key == given or key.startswith(f"{given}.") for given in job.overrides):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and key != "seed"
            shown.setdefault(key, value if is_number or isinstance(value, str) else json.dumps(value))
    return shown


def _read_back(line: dict[str, Any]) -> Event:
    """Return the event of a line of events.jsonl."""
    values = {key: value for key, value in line.items() if key not in ("event", "step", "run_s")}
    return Event(line["event"], line["step"], line["run_s"], values)


def _remove(files: list[Path]) -> None:
    """Remove event files whose curves are written again, and their directory if it is ``tb`` and empty."""
    for file in files:
        with suppress(OSError):  # it stays, and TensorBoard shows what both files have
            file.unlink()
    for folder in {file.parent for file in files if file.parent.name == "tb"}:
        with suppress(OSError):  # a user keeps other files there
            folder.rmdir()


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
