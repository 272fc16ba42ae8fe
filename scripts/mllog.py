"""Print a run in MLPerf's log format, readable by its tools. No compliance is claimed.

python scripts/mllog.py RUN > mllog.txt
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from imagenet_fast.atomic_io import to_json
from imagenet_fast.errors import UserError, exit_with_error
from imagenet_fast.metrics.events import Event, read_events
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.run_dir import RunDir

_TYPES = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}  # by the last word of a key; of others POINT_IN_TIME


def mllog_lines(folder: Path) -> Iterator[str]:
    """Yield the lines of a run, as if it had not been interrupted. Raises UserError if it cannot be read."""
    run, events = RunDir(folder), read_events(folder)
    begun_s, last_ms = run.events.stat().st_mtime - events[-1]["run_s"] if events else 0.0, 0
    for at_s, key, value, about in _entries(run.read_job(), events):
        last_ms = max(last_ms, int(1000 * (begun_s + at_s)))
        line = {"namespace": "", "time_ms": last_ms, "event_type": _TYPES.get(key.split("_")[-1], "POINT_IN_TIME")}
        line |= {"key": key, "value": value}
        line["metadata"] = {"file": "imagenet_fast/training/trainer.py", "lineno": 0, **about}
        yield f":::MLLOG {to_json(line)}"


def _entries(job: Job, events: list[Event]) -> Iterator[tuple[float, str, Any, dict[str, Any]]]:
    """Yield time, key, value and metadata of each line, in the order of MLPerf's training rules (4.0).

    Times are those of the run's clock, which stands between a checkpoint and resuming from it. What ranks did before it
    went is not timed.
    """
    begun = next((event for event in events if event["event"] == "run"), {})
    name = job.recipe.model.label
    points = {
        "init_start": None,
        "cache_clear": False,
        "submission_benchmark": "resnet" if name == "resnet50" else name,
        "submission_division": "open",
        "submission_org": "unsubmitted",
        "submission_platform": "unsubmitted",
        "submission_status": "research",
        "seed": job.recipe.seed,
        "global_batch_size": job.batching.global_batch,
        "gradient_accumulation_steps": job.batching.accumulation,
        "train_samples": begun.get("train_images"),
        "eval_samples": begun.get("val_images"),
        "opt_name": job.recipe.optim.kind,
        "init_stop": None,
        "run_start": None,
    }
    for key, value in points.items():
        yield 0.0, key, value, {}
    epoch: dict[str, Any] = {}  # the one that is under way
    for event in events:
        with suppress(KeyError, TypeError):  # a damaged event
            name, now_s = event["event"], event["run_s"]
            begun_s = now_s - event["eval_s"] if name == "eval" else now_s
            if epoch and name in ("epoch", "eval", "end"):
                yield begun_s, "epoch_stop", None, epoch
                epoch = {}
            match name:
                case "epoch":
                    epoch = {"epoch_num": event["epoch"]}
                    yield now_s, "epoch_start", None, epoch
                case "eval":
                    evaluated = {"epoch_num": event["epoch"]}
                    yield begun_s, "eval_start", None, evaluated
                    yield now_s, "eval_accuracy", event["top1"] / 100, evaluated
                    yield now_s, "eval_stop", None, evaluated
                case "end":
                    status = "success" if event["status"] == "reached" else "aborted"
                    yield now_s, "run_stop", None, {"status": status}


if __name__ == "__main__":
    try:
        for folder in sys.argv[1:]:
            print(*mllog_lines(Path(folder)), sep="\n")
    except UserError as error:
        exit_with_error(str(error))
