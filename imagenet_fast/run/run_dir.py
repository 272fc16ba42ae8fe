"""A run's directory: the names of all that is in it, and what may be done with it; without torch."""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
import time
from pathlib import Path

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.job import Job, read_job

_CHECKPOINT = "step-"  # how the name of a checkpoint begins
_TENSORBOARD = "events.out.tfevents."


def new_folder(recipe: str, what: str) -> Path:
    """Return a new directory for a run without ``--out``, named after the time, the ``recipe`` and ``what``.

    No other start has its name, though it begins in the same second on another node: six digits are random.
    """
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{what}-{secrets.token_hex(3)}"


class RunDir:
    """The directory of a run. Every file in it has its name here, and nowhere else."""

    def __init__(self, folder: Path) -> None:
        """Name the files in ``folder``, which need not exist."""
        self.folder = folder
        self.job = folder / "job.json"
        """What was asked for. Where it is, ``train`` has begun."""
        self.recipe = folder / "recipe.toml"
        """The recipe with all its values."""
        self.environment = folder / "environment.json"
        """Versions, hardware and environment variables."""
        self.events = folder / "events.jsonl"
        """Every event, one a line."""
        self.outcome = folder / "outcome.json"
        """How the run ended; the ranks of a launcher leave one in its directory, too."""
        self.trace = folder / "trace.json"
        """With ``--trace``: a timeline of a few steps."""
        self.checkpoints = folder / "checkpoints"
        """The directories of the checkpoints, and the final weights."""
        self.final_weights = self.checkpoints / "final.safetensors"
        """The weights of a run that has ended."""

    def tensorboard(self, begun: int) -> Path:
        """Return the event file for TensorBoard of the part of the run that began at ``begun`` seconds."""
        return self.folder / f"{_TENSORBOARD}{begun:010}.{platform.node()}"

    def tensorboard_times(self) -> list[int]:
        """Return when the parts of the run began that have an event file for TensorBoard."""
        return [int(file.name.split(".")[3]) for file in self.folder.glob(f"{_TENSORBOARD}[0-9]*")]

    def read_job(self) -> Job:
        """Return the job. Raises UserError if there is none, or it cannot be read."""
        try:
            return read_job(self.job, Job)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f"{self.job} is damaged or of another version; name a recipe with --recipe") from None

    def holds_run(self) -> bool:
        """Return whether there are results of a run. Raises OSError."""
        results = (self.events, self.outcome, self.final_weights, *self.checkpoints.glob(f"{_CHECKPOINT}*"))
        return any(path.exists() for path in results)

    def check_writable(self, resume: bool = False) -> None:
        """Raise UserError if the directory cannot be written, or holds a run that is not to ``resume``."""
        folder = nearest = self.folder
        try:
            if not resume and self.holds_run():
                raise UserError(f"{folder} already holds a run; give another --out, remove it, or resume it by `train`")
            places = (self.checkpoints, folder, *folder.absolute().parents)
            nearest = next(place for place in places if os.path.lexists(place))
            if not nearest.is_dir():
                raise UserError(f"the run cannot be written to {folder}: {nearest} is no directory; give another --out")
            tempfile.TemporaryFile(dir=nearest).close()  # root passes permission checks, but cannot write everywhere
        except OSError as error:
            raise UserError(
                f"the run cannot be written to {folder} ({error.strerror}: {nearest}); make that writable, or give "
                "another --out"
            ) from None


def split_checkpoint(given: Path) -> tuple[Path, str | None]:
    """Split ``RUN@WHICH`` into a run directory and the name of a checkpoint.

    Any other path is returned unchanged, with None; so is a path that exists under its whole name.

    Raises:
        UserError: The path cannot be examined.
    """
    before, at, which = str(given).rpartition("@")
    try:
        if not at or "/" in which or given.exists() or not Path(before).is_dir():
            return given, None
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror}); give a file of weights, or a run") from None
    return Path(before), which


def weights_file(given: Path) -> Path:
    """Return the weights file that ``given`` names: a file itself, or the final weights of a run directory.

    Raises:
        UserError: There is no such file, or the run has not finished.
    """
    run = RunDir(given)
    try:
        if given.is_file():
            return given
        if run.final_weights.is_file():
            return run.final_weights
        if run.job.exists():
            raise UserError(
                f"{given} holds a run without {run.final_weights.relative_to(given)}, since it has not come to its "
                f"end; give one of its checkpoints, as {given}@newest, another run, or a file of weights"
            )
        what = f"{given} is a directory without a run" if given.is_dir() else f"there is no file {given}"
        raise UserError(f"{what}; give a file of weights, or a run directory that `train` made")
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror}); give a file of weights, or a run") from None
