"""Event files for TensorBoard: curves, a layout of charts, and a row in the table of hyper-parameters.

They lie in the run directory itself, so ``tensorboard --logdir runs`` calls each run by its name. A run that resumes
begins another file, which tells TensorBoard to forget what came after the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams

from imagenet_fast.metrics.events import Event
from imagenet_fast.metrics.past_run import PastRun
from imagenet_fast.recipe.job import Job, flat_tables, recipe_tables
from imagenet_fast.run.run_dir import RunDir

_SCALARS = {"train", "speed", "sync", "data", "precision", "eval"}
"""Events whose values are scalars."""

_NO_CURVES = {"event", "step", "run_s", "epoch", "images", "eval_s", "train_s"}
"""Values that are left out, since no run is judged by them."""

_CHARTS = {
    "top-1 (%)": "eval/top1",
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


class TensorBoard:
    """A sink that writes an event file to the run directory."""

    def __init__(self, job: Job, resumed: int | None = None, past: Sequence[Event] = ()) -> None:
        """Open a new event file.

        Args:
            job: The run: its directory, and the recipe that is shown as hyper-parameters.
            resumed: The step from which the run resumes. None: it begins.
            past: The events that ``take_back`` has kept.
        """
        run = RunDir(job.folder)
        self._compared = [event for event in past if event["event"] in ("run", "speed", "eval")]
        self._record = PastRun(job.folder, self._compared, "")
        # TensorBoard reads files in the order of their names, in which it expects the time, whatever the clock says.
        times = run.tensorboard_times()
        now = max([int(time.time()), *(before + 1 for before in times)])
        self._begun = now if resumed is None else min(times, default=now)
        self._file = RecordWriter(run.tensorboard(now).open("ab", buffering=0))
        self._add(file_version="brain.Event:2")
        self._add(session_log=SessionLog(status=SessionLog.START), step=0 if resumed is None else resumed + 1)
        # Without the summary of the experiment the table's columns are made from all runs, those that differ first.
        _, row, self._success = hparams(hyperparameters(job), {})
        self._add(summary=row)
        charts = {title: ["Multiline", [f"^{tag}$"]] for title, tag in _CHARTS.items()}
        self._add(summary=custom_scalars({"Overview": charts}))

    def __call__(self, event: Event) -> None:
        """Write the event's scalars. Raises OSError, and they are lost, if they cannot be written.

        Those in ``compare`` are what runs are compared by. TensorBoard's table of hyper-parameters shows the last value
        of each tag, and by default of the first five in alphabetical order.
        """
        name, scalars, compared = event["event"], {}, {}
        if name in ("run", "speed", "eval"):
            self._compared.append(event)
        if name in _SCALARS:
            scalars = {f"{name}/{key}": value for key, value in event.items() if key not in _NO_CURVES}
        if name == "eval":
            known = [top1 for top1 in self._record.curve("eval", "top1")[1] if not math.isnan(top1)]
            compared = {"top1_best": max(known, default=None), "step_s": self._record.step_s}
        if name == "end":
            compared = {"time_to_accuracy_s": event["time_to_accuracy_s"]}
            if event["status"] in ("reached", "finished"):
                self._add(summary=self._success)
        scalars |= {f"compare/{key}": value for key, value in compared.items() if value is not None}
        if scalars:
            values = [Summary.Value(tag=t, simple_value=math.nan if v is None else v) for t, v in scalars.items()]
            self._add(event["run_s"], step=event["step"], summary=Summary(value=values))
        if name == "end":
            self._file.close()

    def _add(self, run_s: float = 0.0, **content: Any) -> None:
        self._file.write(Record(wall_time=self._begun + run_s, **content).SerializeToString())


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
    # A file's name may have bytes that the locale could not decode.
    return {k: os.fsencode(v).decode(errors="replace") if isinstance(v, str) else v for k, v in shown.items()}
