"""The result of a run: accuracies, ``outcome.json`` and the exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from imagenet_fast.atomic_io import atomic_write_text, to_json
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.units import number

STOPPED = 4
"""Exit code of a run that a signal stopped without loss. The same command resumes it."""

STOPPED_WORDS = "stopped by a signal"
NOT_BEGUN = f"{STOPPED_WORDS}, and nothing is lost; the same command starts it again"
"""Message of a run that was stopped before it wrote anything."""

BEARABLE_WAIT_PCT = 5.0
"""Percent of training spent waiting for images, above which a run reports it."""

_METRICS = {
    "top1": "top-1",
    "top1_mirror": "top-1 with mirror images",
    "top1_shift": "top-1 with mirror images and shifts",
}
"""Names of the accuracies that a target may be for."""

Status = Literal["reached", "finished", "preempted", "failed", "interrupted"]

_OWN = {
    "status", "recipe", "sync", "world_size", "global_batch", "target_top1", "target_mirrored", "message", "wrong_from",
}  # fmt: skip
"""What a run that resumes has of its own."""


@dataclasses.dataclass(kw_only=True)
class Accuracy:
    """Top-1 and top-5 accuracy over ``images`` validation images, in percent; None: not measured.

    The label is the first, or among the first five, of the model's guesses.
    """

    top1: float | None = None
    top5: float | None = None
    top1_mirror: float | None = None
    """Top-1 by the mean logits of each image and its mirror image."""
    top5_mirror: float | None = None
    """Top-5 by the same."""
    top1_shift: float | None = None
    """Top-1 by the mean logits of shifted images, too."""
    top5_shift: float | None = None
    """Top-5 by the same."""
    images: int = 0
    bad_images: int | None = None
    """Images that could not be decoded, and were counted as wrong; None: no such image."""

    def measured(self) -> dict[str, Any]:
        """Return what was measured, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def target_metric(values: Mapping[str, Any], mirrored: bool) -> str:
    """Return the name of the accuracy that is compared with the target.

    Args:
        values: Accuracies of an evaluation, by name.
        mirrored: The recipe's ``target_mirrored``.
    """
    if not mirrored:
        return "top1"
    return "top1_mirror" if values.get("top1_shift") is None else "top1_shift"


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
    """Run time at the end, or at the checkpoint from which the run resumed."""
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
        for key in vars(self).keys() - _OWN:
            setattr(self, key, saved[key])
        last = vars(self) | {"run_s": self.judged_s if self.time_to_accuracy_s is None else self.time_to_accuracy_s}
        self.clear_target()
        self.judge([last])

    def judge(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Set the status and the time to accuracy by the first of ``evaluations`` that reached the target, if one did.

        Args:
            evaluations: Accuracies by name, and as ``run_s`` the run time at the end of the evaluation.
        """
        for evaluation in evaluations:
            top1 = evaluation.get(target_metric(evaluation, self.target_mirrored))
            if self.target_top1 is not None and isinstance(top1, int | float) and top1 >= self.target_top1:
                self.status, self.time_to_accuracy_s = "reached", evaluation["run_s"]
                break

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
        if self.time_to_accuracy_s is None:
            self.judge([vars(self) | {"run_s": run_s}])

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
        atomic_write_text(RunDir(folder).outcome, to_json(self, indent=2) + "\n", shared=True)


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


def verdict(outcome: Mapping[str, Any]) -> str:
    """Return one sentence on how the run ended."""
    target, message = outcome["target_top1"], outcome["message"]
    metric = target_metric(outcome, outcome["target_mirrored"])
    top1, what = outcome[metric], _METRICS[metric]
    match outcome["status"]:
        case "reached":
            return f"Target reached: {what} {top1:.2f} % of {target:g} % after {outcome['epochs']} epochs."
        case "finished" if target is not None:
            return f"Trained to the end without reaching {target:g} % {what} (last {number(top1, '.2f')} %)."
        case "finished":
            return "Trained to the end; the recipe has no target."
        case "preempted" | "interrupted":
            return f"{message[:1].upper()}{message[1:]}."
        case _:
            return f"Failed in step {outcome['steps']}" + (f": {message}" if message else ".")
