"""How a run ended: ``outcome.json``, and the exit code it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.record.replacing import replace_text
from imagenet_fast.record.strict_json import to_json

STOPPED = 4
"""The exit code of a run that a signal has stopped, and that has been saved: the same command goes on."""

Status = Literal["reached", "finished", "preempted", "failed", "interrupted"]


@dataclass
class Outcome:
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

    @classmethod
    def of(cls, name: str, recipe: Recipe, batching: Batching) -> Outcome:
        """Of a run of the recipe ``name`` in which nothing has happened yet."""
        return cls("failed", name, recipe.sync.kind, batching.ranks, batching.global_batch, recipe.target_top1)

    @classmethod
    def beginning(cls, job: Job) -> Outcome:
        """Of ``job``, before it."""
        return cls.of(job.name, job.recipe, job.batching)

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """What has been reached is what a checkpoint has ``saved``; who trains, and for which target, is as it is."""
        ours = ("status", "recipe", "sync", "world_size", "global_batch", "target_top1", "message")
        for key in vars(self).keys() - ours:
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

    def judge(self, top1: float, top5: float, run_s: float) -> None:
        """An evaluation has ended ``run_s`` into the run."""
        self.top1, self.top5 = top1, top5
        if self._meets_target:
            self.status = "reached"
            self.time_to_accuracy_s = run_s

    @property
    def exit_code(self) -> int:
        """0 target reached or none set, 1 error or interrupted, 3 trained to the end short of it, 4 stopped by a signal
        and saved."""
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


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of the run in ``folder``, with None for a number that was not finite; None while there is none."""
    path = folder / "outcome.json"
    return Outcome(**json.loads(path.read_text())) if path.is_file() else None
