"""mllog.txt: the run in MLPerf's log format, readable by its tools. No compliance is claimed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.events import AppendedFile, Event
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.optim_config import Lars, Polynomial
from imagenet_fast.recipe.schema import Recipe

Kind = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]


class MLLog:
    """A sink that writes one ``:::MLLOG`` line per key, in the order of MLPerf's training rules (4.0)."""

    def __init__(self, folder: Path, recipe: Recipe, batching: Batching, resumed: int | None = None) -> None:
        """Open the file.

        Args:
            folder: The run directory.
            recipe: The recipe, whose hyper-parameters are logged.
            batching: The split of the global batch.
            resumed: The step from which the run resumes; later lines are removed. None: the run begins.
        """
        self._path = RunDir(folder).mllog
        self._file = AppendedFile(self._path)
        self._lines: list[str] = []
        """The lines of the event at hand. They are written at once, so that a full disk delays an event as a whole."""
        self._recipe = recipe
        self._batching = batching
        self._epoch: int | None = None
        self._resumed = resumed
        self._before_ms = 0
        """Time of the last line. Times never decrease, even if the clock is set back."""

    def write(self, event: Event) -> None:
        """Write the lines of one event."""
        self._lines.clear()
        self._add_lines(event)
        self._file.write("".join(self._lines).encode())

    def _add_lines(self, event: Event) -> None:
        values = event.values
        match event.name:
            case "run" if self._resumed is not None and self._path.stat().st_size:
                self._go_on(*divmod(self._resumed, values["steps_per_epoch"]))
            case "run":
                self._begin(values["train_images"], values["val_images"], values["steps_per_epoch"], event.run_s)
            case "epoch":
                self._end_epoch()
                self._epoch = values["epoch"]
                self._line("INTERVAL_START", "epoch_start", epoch_num=self._epoch)
            case "eval":
                self._end_epoch(ago_s=values["eval_s"])
                epoch = {"epoch_num": values["epoch"]}
                self._line("INTERVAL_START", "eval_start", ago_s=values["eval_s"], **epoch)
                self._line("POINT_IN_TIME", "eval_accuracy", values["top1"] / 100, **epoch)
                self._line("INTERVAL_END", "eval_stop", **epoch)
            case "end":
                self._end_epoch()
                status = "success" if values["status"] == "reached" else "aborted"
                self._line("INTERVAL_END", "run_stop", status=status)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _go_on(self, done: int, into: int) -> None:
        """Resume after ``done`` epochs and ``into`` steps of the next: remove all later lines.

        Raises:
            UserError: The file cannot be written anew.
        """
        lines = self._path.read_text(errors="replace", encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _belongs(line, done, into > 0)]
        try:
            atomic_write_text(self._path, "".join(kept), shared=True)
        except OSError as error:
            raise UserError(f"{self._path} cannot be written ({error.strerror}); see to that, or restore it") from None
        self._file.close()
        self._file = AppendedFile(self._path)
        self._epoch = done + 1 if into else None
        self._before_ms = max((_entry(line)["time_ms"] for line in kept), default=0)

    def _now_ms(self, ago_s: float) -> int:
        """Return the time ``ago_s`` seconds ago, in milliseconds, but not before the previous line's time."""
        self._before_ms = max(self._before_ms, int((time.time() - ago_s) * 1000))
        return self._before_ms

    def _end_epoch(self, ago_s: float = 0.0) -> None:
        """Close the epoch that is open, if any, ``ago_s`` seconds ago."""
        if self._epoch is not None:
            self._line("INTERVAL_END", "epoch_stop", ago_s=ago_s, epoch_num=self._epoch)
            self._epoch = None

    def _begin(self, train_images: int, val_images: int, steps_per_epoch: int, ago_s: float) -> None:
        """Log a run that began ``ago_s`` seconds ago; the start of the ranks before that is not timed."""
        recipe, optim, schedule = self._recipe, self._recipe.optim, self._recipe.schedule
        name = recipe.model.label
        points: dict[str, Any] = {
            "cache_clear": False,
            "submission_benchmark": "resnet" if name == "resnet50" else name,
            "submission_division": "open",
            "submission_org": "unsubmitted",
            "submission_platform": "unsubmitted",
            "submission_status": "research",
            "seed": recipe.seed,
            "global_batch_size": self._batching.global_batch,
            "gradient_accumulation_steps": self._batching.accumulation,
            "train_samples": train_images,
            "eval_samples": val_images,
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
                decay = (recipe.epochs - warmup) * steps_per_epoch
                points |= {
                    "lars_opt_end_learning_rate": schedule.end_lr,
                    "lars_opt_learning_rate_decay_poly_power": schedule.power,
                    "lars_opt_learning_rate_decay_steps": round(decay),
                }
        self._line("INTERVAL_START", "init_start", ago_s=ago_s)
        for key, value in points.items():
            self._line("POINT_IN_TIME", key, value, ago_s=ago_s)
        self._line("INTERVAL_END", "init_stop", ago_s=ago_s)
        self._line("INTERVAL_START", "run_start", ago_s=ago_s)

    def _line(self, kind: Kind, key: str, value: Any = None, ago_s: float = 0.0, **metadata: Any) -> None:
        """Add one line, dated ``ago_s`` seconds ago."""
        entry = {
            "namespace": "",
            "time_ms": self._now_ms(ago_s),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "imagenet_fast/training/trainer.py", "lineno": 0, **metadata},
        }
        self._lines.append(f":::MLLOG {to_json(entry)}\n")


def _belongs(line: str, done: int, begun: bool) -> bool:
    """Return whether the line is of the first ``done`` epochs, or starts the next one and that has ``begun``."""
    try:
        entry = _entry(line)
        if type(entry["time_ms"]) is not int:
            return False
        key, epoch = entry["key"], entry["metadata"].get("epoch_num", 0)
        return key != "run_stop" and (epoch <= done or (begun and key == "epoch_start" and epoch == done + 1))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # damaged, so no tool could read it
        return False


def _entry(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; raise ValueError or RecursionError if there is none."""
    entry: dict[str, Any] = json.loads(line.removeprefix(":::MLLOG "))
    return entry
