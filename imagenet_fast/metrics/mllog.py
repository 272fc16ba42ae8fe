"""mllog.txt: the run in MLPerf's log format, readable by its tools. No compliance is claimed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.events import Event, read_events
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.optim_config import Lars, Polynomial

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"

Line = tuple[float, dict[str, Any]]
"""When on the run's own clock, and what."""


class MLLog:
    """A sink that writes the whole log from ``events.jsonl`` when the run ends."""

    def __init__(self, job: Job) -> None:
        """Create the sink of the run of ``job``."""
        self._job = job

    def write(self, event: Event) -> None:
        """Write the log if this event is the end, with a warning if that cannot be done."""
        if event.name != "end":
            return
        begun_s, last_ms, text = time.time() - event.run_s, 0, ""
        try:
            for at_s, line in mllog_lines(self._job, read_events(self._job.folder)):
                last_ms = max(last_ms, int(1000 * (begun_s + at_s)))
                text += f":::MLLOG {to_json({'namespace': '', 'time_ms': last_ms, **line})}\n"
            atomic_write_text(RunDir(self._job.folder).mllog, text)
        except (OSError, UserError) as error:
            warn(f"mllog.txt is not written: {error}")

    def close(self) -> None:
        """Do nothing: there is no open file."""


def mllog_lines(job: Job, events: Iterable[dict[str, Any]]) -> Iterator[Line]:
    """Yield the lines for the ``events`` of a run, in the order of MLPerf's training rules (4.0).

    Their times are those of the run's clock, which stands between a checkpoint and resuming from it.
    """
    has_begun, epoch = False, None  # the epoch that is under way
    for event in events:
        with suppress(KeyError, TypeError):  # a damaged event
            name, now_s = event["event"], event["run_s"]
            ended_s = now_s - event["eval_s"] if name == "eval" else now_s
            if epoch is not None and name in ("epoch", "eval", "end"):
                yield _line(ended_s, _END, "epoch_stop", epoch_num=epoch)
                epoch = None
            match name:
                case "run" if not has_begun:
                    yield from _beginning(job, event)
                    has_begun = True
                case "epoch":
                    epoch = event["epoch"]
                    yield _line(now_s, _START, "epoch_start", epoch_num=epoch)
                case "eval":
                    yield _line(ended_s, _START, "eval_start", epoch_num=event["epoch"])
                    yield _line(now_s, _POINT, "eval_accuracy", event["top1"] / 100, epoch_num=event["epoch"])
                    yield _line(now_s, _END, "eval_stop", epoch_num=event["epoch"])
                case "end":
                    status = "success" if event["status"] == "reached" else "aborted"
                    yield _line(now_s, _END, "run_stop", status=status)


def _beginning(job: Job, event: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines from when on the run's clock goes; what ranks did before is not timed."""
    recipe, optim, schedule = job.recipe, job.recipe.optim, job.recipe.schedule
    name = recipe.model.label
    points: dict[str, Any] = {
        "cache_clear": False,
        "submission_benchmark": "resnet" if name == "resnet50" else name,
        "submission_division": "open",
        "submission_org": "unsubmitted",
        "submission_platform": "unsubmitted",
        "submission_status": "research",
        "seed": recipe.seed,
        "global_batch_size": job.batching.global_batch,
        "gradient_accumulation_steps": job.batching.accumulation,
        "train_samples": event["train_images"],
        "eval_samples": event["val_images"],
        "opt_name": optim.kind,
    }
    if isinstance(optim, Lars):
        points |= {
            "lars_epsilon": optim.epsilon,
            "lars_opt_base_learning_rate": optim.lr,
            "lars_opt_learning_rate_warmup_epochs": schedule.warmup_epochs,
            "lars_opt_momentum": optim.momentum,
            "lars_opt_weight_decay": optim.weight_decay,
        }
        if isinstance(schedule, Polynomial):
            warmup = schedule.warmup_epochs if schedule.decay_from == "warmup" else 0.0
            points |= {
                "lars_opt_end_learning_rate": schedule.end_lr,
                "lars_opt_learning_rate_decay_poly_power": schedule.power,
                "lars_opt_learning_rate_decay_steps": round((recipe.epochs - warmup) * event["steps_per_epoch"]),
            }
    yield _line(0.0, _START, "init_start")
    for key, value in points.items():
        yield _line(0.0, _POINT, key, value)
    yield _line(0.0, _END, "init_stop")
    yield _line(0.0, _START, "run_start")


def _line(at_s: float, kind: str, key: str, value: Any = None, **about: Any) -> Line:
    where = {"file": "imagenet_fast/training/trainer.py", "lineno": 0}
    return at_s, {"event_type": kind, "key": key, "value": value, "metadata": {**where, **about}}
