"""How a run ended: ``outcome.json``, and the exit code it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from imagenet_fast.errors import UserError
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.replace_file import replace_text
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe

STOPPED = 4
"""The exit code of a run that a signal has stopped, of which nothing is lost: the same command goes on."""

STOPPED_WORDS = "stopped by a signal"
NOTHING_LOST = f"{STOPPED_WORDS}, and nothing is lost; the same command with --resume auto goes on"
"""The message of a run that was stopped before it had trained anything that was not saved."""

_BEARABLE_PCT = 5.0
"""Of training. A run that waits longer for its images says so."""

Status = Literal["reached", "finished", "preempted", "failed", "interrupted"]


@dataclass
class RunResult:
    """The result of a run. Accuracies in percent, times in seconds, ``None`` where there is nothing to say."""

    status: Status
    """Until the run has ended, ``failed``: what is true if it ends here."""
    recipe: str
    sync: str
    world_size: int
    global_batch: int
    target_top1: float | None = None
    top1: float | None = None
    top5: float | None = None
    time_to_accuracy_s: float | None = None
    train_s: float = 0.0
    run_s: float = 0.0
    epochs: int = 0
    steps: int = 0
    images_per_s: float = 0.0
    sent_bytes_per_step: float = 0.0
    message: str = ""
    resumed: int = 0
    """How often it has gone on from a checkpoint."""
    gap_s: float = 0.0
    """That lay between a checkpoint and going on from it, all together; in no other time."""
    wrong_from: int | None = None
    """The first step whose loss was not finite, where that has ended the run."""
    data_wait_pct: float | None = None
    """The share of training in which a device stood still for its images, by the rank that did so longest from one
    log line to the next. Each process's first step, evaluations and steps behind the last log line are left out."""
    data_wait_of_s: float = 0.0
    """What that is a share of."""

    @property
    def is_starved(self) -> bool:
        """Whether it has waited for its images for too long."""
        return (self.data_wait_pct or 0.0) > _BEARABLE_PCT

    @classmethod
    def of(cls, name: str, recipe: Recipe, batching: Batching) -> RunResult:
        """Of a run of the recipe ``name`` in which nothing has happened yet."""
        return cls("failed", name, recipe.sync.kind, batching.ranks, batching.global_batch, recipe.target_top1)

    @classmethod
    def beginning(cls, job: Job) -> RunResult:
        """Of ``job``, before it."""
        return cls.of(job.name, job.recipe, job.batching)

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """What has been reached is what a checkpoint has ``saved``; who trains, and for which target, is as it is."""
        ours = ("status", "recipe", "sync", "world_size", "global_batch", "target_top1", "message", "wrong_from")
        for key in vars(self).keys() & saved.keys() - ours:  # an older version has saved fewer
            setattr(self, key, saved[key])
        if self._meets_target:
            self.status = "reached"
        else:
            self.time_to_accuracy_s = None

    @property
    def _meets_target(self) -> bool:
        return self.target_top1 is not None and self.top1 is not None and self.top1 >= self.target_top1

    def advance(self, epoch: int, step: int, train_s: float, sent_bytes: int) -> None:
        """Step ``step``, in epoch ``epoch``, is done."""
        self.epochs = epoch
        self.steps = step
        self.train_s = train_s
        self.images_per_s = step * self.global_batch / train_s
        self.sent_bytes_per_step = sent_bytes / step

    def wait_for_data(self, waited_s: float, of_s: float) -> None:
        """So long in so many seconds more of training."""
        waited_s += (self.data_wait_pct or 0.0) / 100 * self.data_wait_of_s
        self.data_wait_of_s += of_s
        if self.data_wait_of_s:
            self.data_wait_pct = 100 * waited_s / self.data_wait_of_s

    def judge(self, top1: float, top5: float, run_s: float) -> None:
        """An evaluation has ended ``run_s`` into the run."""
        self.top1, self.top5 = top1, top5
        if self._meets_target:
            self.status = "reached"
            self.time_to_accuracy_s = run_s

    @property
    def exit_code(self) -> int:
        """0 target reached or none set, 1 error or interrupted, 3 trained to the end short of it, 4 stopped by a signal
        without loss."""
        match self.status:
            case "reached":
                return 0
            case "finished":
                return 3 if self.target_top1 is not None else 0
            case "preempted":
                return STOPPED
            case _:
                return 1

    def write(self, folder: Path) -> None:
        """Replace ``outcome.json`` in one move, so that a reader never sees half of it; nodes may share ``folder``."""
        replace_text(folder / "outcome.json", to_json(asdict(self), indent=2) + "\n")


def read_outcome(folder: Path) -> RunResult | None:
    """The outcome of the run in ``folder``, with None for a number that was not finite; None while there is none.

    Raises UserError where it is damaged.
    """
    path = folder / "outcome.json"
    try:
        outcome = RunResult(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        outcome = None
    if outcome is None or not _is_sound(outcome):
        raise UserError(f"{path} is damaged or of another version; remove it, and the events tell what they can")
    return outcome


def _is_sound(outcome: RunResult) -> bool:
    """Whether it has what an outcome has, after it was read from a file that may hold anything."""

    def fits(value: Any, kind: Any) -> bool:
        if kind in (str, int):
            return type(value) is kind
        return value is None or (type(value) in (int, float) and math.isfinite(value))

    kinds = get_type_hints(RunResult)
    status = kinds.pop("status")
    return outcome.status in get_args(status) and all(fits(getattr(outcome, name), kinds[name]) for name in kinds)
