"""How a run ended: ``outcome.json``, and the exit code it stands for."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from imagenet_fast.recipe.job import Job
from imagenet_fast.record.strict_json import to_json

Status = Literal["reached", "finished", "failed", "interrupted"]


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

    @classmethod
    def beginning(cls, job: Job) -> Outcome:
        """Of a run in which nothing has happened yet."""
        batching = job.batching
        return cls(
            "failed", job.name, job.recipe.sync.kind, batching.ranks, batching.global_batch, job.recipe.target_top1
        )

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
        if self.target_top1 is not None and top1 >= self.target_top1:
            self.status = "reached"
            self.time_to_accuracy_s = run_s

    @property
    def exit_code(self) -> int:
        """0 target reached or none set, 1 error or interrupted, 3 trained to the end short of the target."""
        match self.status:
            case "reached":
                return 0
            case "finished":
                return 3 if self.target_top1 is not None else 0
            case _:
                return 1

    def write(self, folder: Path) -> None:
        """Replace ``outcome.json`` in one move, so that a reader never sees half of it; nodes may share ``folder``."""
        partial = folder / f".outcome.{uuid.uuid4().hex}.json"
        partial.write_text(to_json(asdict(self), indent=2) + "\n")
        partial.replace(folder / "outcome.json")


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of the run in ``folder``, with None for a number that was not finite; None while there is none."""
    path = folder / "outcome.json"
    return Outcome(**json.loads(path.read_text())) if path.is_file() else None
