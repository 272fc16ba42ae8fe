"""mllog.txt: the run in MLPerf's log format, readable by its tools. No compliance is claimed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.metrics.events import AppendedFile, Event
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.optim_config import Lars, Polynomial
from imagenet_fast.recipe.schema import Recipe

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLLog:
    """A sink that writes one ``:::MLLOG`` line per key, in the order of MLPerf's training rules (4.0).

    Lines have the time of the run's own clock, which stands between a checkpoint and resuming from it.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, batching: Batching, past: Iterable[dict[str, Any]], passed_s: float
    ) -> None:
        """Write the lines of the ``past``, and open the file for more.

        Args:
            folder: The run directory.
            recipe: The recipe, whose hyper-parameters are logged.
            batching: The split of the global batch.
            past: The events that ``take_back`` has kept, of a run that resumes.
            passed_s: Seconds of the run until now.
        """
        self._recipe = recipe
        self._batching = batching
        self._begun_s = time.time() - passed_s
        self._last_ms = 0
        self._has_begun = False
        self._epoch: int | None = None  # the one that is under way
        lines: list[str] = []
        for event in past:
            with suppress(KeyError, TypeError):  # a damaged event
                lines += list(self._lines(event["event"], event["run_s"], event))
        path = RunDir(folder).mllog
        atomic_write_text(path, "".join(lines))
        self._file = AppendedFile(path)

    def write(self, event: Event) -> None:
        """Write the lines of one event at once, so that a full disk delays it as a whole."""
        self._file.write("".join(self._lines(event.name, event.run_s, event.values)).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self, name: str, now_s: float, values: dict[str, Any]) -> Iterator[str]:
        match name:
            case "run" if not self._has_begun:
                yield from self._begin(values["train_images"], values["val_images"], values["steps_per_epoch"])
                self._has_begun = True
            case "epoch":
                yield from self._end_epoch(now_s)
                self._epoch = values["epoch"]
                yield self._line(now_s, _START, "epoch_start", epoch_num=self._epoch)
            case "eval":
                begun_s, epoch = now_s - values["eval_s"], values["epoch"]
                yield from self._end_epoch(begun_s)
                yield self._line(begun_s, _START, "eval_start", epoch_num=epoch)
                yield self._line(now_s, _POINT, "eval_accuracy", values["top1"] / 100, epoch_num=epoch)
                yield self._line(now_s, _END, "eval_stop", epoch_num=epoch)
            case "end":
                yield from self._end_epoch(now_s)
                status = "success" if values["status"] == "reached" else "aborted"
                yield self._line(now_s, _END, "run_stop", status=status)

    def _end_epoch(self, at_s: float) -> Iterator[str]:
        if self._epoch is not None:
            yield self._line(at_s, _END, "epoch_stop", epoch_num=self._epoch)
            self._epoch = None

    def _begin(self, train_images: int, val_images: int, steps_per_epoch: int) -> Iterator[str]:
        """Yield the lines of a run's beginning, from when on its clock runs; what ranks did before is not timed."""
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
                points |= {
                    "lars_opt_end_learning_rate": schedule.end_lr,
                    "lars_opt_learning_rate_decay_poly_power": schedule.power,
                    "lars_opt_learning_rate_decay_steps": round((recipe.epochs - warmup) * steps_per_epoch),
                }
        yield self._line(0.0, _START, "init_start")
        for key, value in points.items():
            yield self._line(0.0, _POINT, key, value)
        yield self._line(0.0, _END, "init_stop")
        yield self._line(0.0, _START, "run_start")

    def _line(self, at_s: float, kind: str, key: str, value: Any = None, **metadata: Any) -> str:
        self._last_ms = max(self._last_ms, int(1000 * (self._begun_s + at_s)))
        entry = {
            "namespace": "",
            "time_ms": self._last_ms,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "imagenet_fast/training/trainer.py", "lineno": 0, **metadata},
        }
        return f":::MLLOG {to_json(entry)}\n"
