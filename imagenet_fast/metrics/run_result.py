"""The result of a run: ``outcome.json`` and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.accuracy import Accuracy, target_metric
from imagenet_fast.metrics.json_io import to_json
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe

STOPPED = 4
"""Exit code of a run that a signal stopped without loss. The same command resumes it."""

STOPPED_WORDS = "stopped by a signal"
NOTHING_LOST = f"{STOPPED_WORDS}, and nothing is lost"
"""Begins the message of a run that was stopped while all its training was saved."""
NOT_BEGUN = f"{NOTHING_LOST}; the same command starts it again"
"""Message of a run that was stopped before it wrote anything."""

BEARABLE_WAIT_PCT = 5.0
"""Percent of training spent waiting for images, above which a run reports it."""

Status = Literal["reached", "finished", "preempted", "failed", "interrupted"]

_OWN = {
    "status", "recipe", "sync", "world_size", "global_batch", "target_top1", "target_mirrored", "message", "wrong_from",
}  # fmt: skip
"""What a run that resumes has of its own."""


@dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class RunResult(Accuracy):
    """The result of a run, with the accuracy of its last evaluation.

    Times are in seconds. None: not known, or not set.
    """

    status: Status
    """Status at the end of the run. Until it has ended, ``failed``, which is right if it ends at this point."""
    recipe: str
    sync: str
    world_size: int
    global_batch: int
    target_top1: float | None = None
    time_to_accuracy_s: float | None = None
    """Run time at the end of the first evaluation that reached the target."""
    train_s: float = 0.0
    """Training time, without evaluations."""
    run_s: float = 0.0
    """Run time."""
    epochs: int = 0
    """The epoch of the last step."""
    steps: int = 0
    images_per_s: float = 0.0
    """Images per second of training time."""
    sent_bytes_per_step: float = 0.0
    """Mean bytes that a rank sends per step."""
    message: str = ""
    resumed: int = 0
    """Number of times that the run resumed from a checkpoint."""
    gap_s: float = 0.0
    """Total time between checkpoints and resuming from them; no other time includes it."""
    wrong_from: int | None = None
    """First step with a non-finite loss, if that ended the run."""
    data_wait_pct: float | None = None
    """Percent of training in which a device was idle waiting for images.

    Each log interval counts the rank that waited longest. Left out are each process's first step, evaluations, and
    steps after the last log line.
    """
    data_wait_of_s: float = 0.0
    """Seconds of training that ``data_wait_pct`` is a share of."""
    target_mirrored: bool = False
    """True if the target is for an accuracy by mean logits: ``top1_shift`` if measured, else ``top1_mirror``."""
    judged_s: float | None = None
    """Run time at the end of the last evaluation."""

    @property
    def is_starved(self) -> bool:
        """True if the run waited too long for its images: over 5 % of training."""
        return (self.data_wait_pct or 0.0) > BEARABLE_WAIT_PCT

    @classmethod
    def of(cls, name: str, recipe: Recipe, batching: Batching) -> RunResult:
        """Return the result of a run of the recipe ``name`` before it begins."""
        return cls(
            "failed", name, recipe.sync.kind, batching.ranks, batching.global_batch, recipe.target_top1,
            target_mirrored=recipe.target_mirrored,
        )  # fmt: skip

    def resume_from(self, saved: Mapping[str, Any]) -> None:
        """Take over the progress that a checkpoint has ``saved``.

        Settings of this run stay as they are: recipe, engine, ranks, batch and target. The status, and the time to
        accuracy, follow from the target of this run.
        """
        for key in vars(self).keys() & saved.keys() - _OWN:  # an older version saved fewer keys
            setattr(self, key, saved[key])
        if self._meets_target(vars(self)):
            self._reach(self.judged_s)  # the target was higher when this was measured
        else:
            self.time_to_accuracy_s = None

    def find_time_to_target(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Set the time to accuracy to the first evaluation among ``events`` that reached the target, if one did."""
        evaluations = (event for event in events if event["event"] == "eval")
        reached = (event["run_s"] for event in evaluations if self._meets_target(event))
        self.time_to_accuracy_s = next(reached, self.time_to_accuracy_s)

    def clear_target(self) -> None:
        """Take back that the target was reached: by an evaluation of earlier weights than those that training has."""
        self.status, self.time_to_accuracy_s = "failed", None

    def advance(self, epoch: int, step: int, train_s: float, sent_bytes: int) -> None:
        """Record that step ``step``, in epoch ``epoch``, is done; ``sent_bytes`` is the total of a rank."""
        self.epochs = epoch
        self.steps = step
        self.train_s = train_s
        self.images_per_s = step * self.global_batch / train_s
        self.sent_bytes_per_step = sent_bytes / step

    def add_wait(self, waited_s: float, of_s: float) -> None:
        """Add ``waited_s`` seconds of waiting for data in ``of_s`` more seconds of training."""
        waited_s += (self.data_wait_pct or 0.0) / 100 * self.data_wait_of_s
        self.data_wait_of_s += of_s
        if self.data_wait_of_s:
            self.data_wait_pct = 100 * waited_s / self.data_wait_of_s

    def record_eval(self, accuracy: Accuracy, run_s: float) -> None:
        """Record an evaluation that ended ``run_s`` seconds into the run."""
        for name, value in vars(accuracy).items():
            setattr(self, name, value)
        self.judged_s = run_s
        if self._meets_target(vars(self)):
            self._reach(run_s)

    def _meets_target(self, values: Mapping[str, Any]) -> bool:
        """Return whether there is a target, and the accuracies in ``values`` reach it."""
        top1 = values.get(target_metric(values, self.target_mirrored))
        return self.target_top1 is not None and isinstance(top1, int | float) and top1 >= self.target_top1

    def _reach(self, run_s: float | None) -> None:
        self.status = "reached"
        if self.time_to_accuracy_s is None:
            self.time_to_accuracy_s = run_s

    @property
    def exit_code(self) -> int:
        """The exit code of the run.

        0: target reached, or no target set. 1: error or interrupted. 3: trained to the end without reaching the target.
        4: stopped by a signal without loss.
        """
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
        """Replace ``outcome.json`` atomically, so that a reader never sees half of it.

        Nodes may share ``folder``.
        """
        atomic_write_text(RunDir(folder).outcome, to_json(asdict(self), indent=2) + "\n", shared=True)


def read_outcome(folder: Path) -> RunResult | None:
    """Read the outcome of the run in ``folder``; None if there is none yet.

    Raises:
        UserError: The file is damaged.
    """
    path = RunDir(folder).outcome
    try:
        return RunResult(**json.loads(path.read_bytes()))  # a name in it may be no UTF-8, which pydantic does not read
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        raise UserError(
            f"{path} is damaged or of another version; remove it, and the events tell what they can"
        ) from None
