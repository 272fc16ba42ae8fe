"""Lock a run directory for one run at a time.

It is locked before anything in it is written. The record of an earlier run is moved aside, never deleted.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from imagenet_fast.checkpoint import had_none
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import refused_together
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.json_io import read_events
from imagenet_fast.metrics.report import EVENT_FILES, FINAL_WEIGHTS
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.job_setup import check_writable

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints in a run directory."""

_LOCK_TIMEOUT_S = 5.0  # for another process to release the lock: a rank needs a moment to see that its launcher died
_RECORD = (
    "events.jsonl", "mllog.txt", "outcome.json", "job.json", "recipe.toml", "environment.json", "trace.json", "tb",
)  # fmt: skip
_held: set[Path] = set()


@contextmanager
def claimed(job: Job, world: DistContext) -> Iterator[None]:
    """Make the directory of ``job`` and lock it for this run, on rank 0; before this the run has written nothing.

    At the end, remove the directory if nothing was written to it.

    Raises:
        UserError: On every rank, if another process trains there, or a run is there that ``job`` must not resume.
    """
    try:
        with refused_together(world.device):
            if world.is_main:
                _claim(job)
        yield
    finally:
        if world.is_main:
            with suppress(OSError):  # the directory is not empty
                job.folder.rmdir()


def _claim(job: Job) -> None:
    try:
        check_writable(job.folder, job.resume)
        make_and_lock_run_dir(job.folder)
        check_writable(job.folder, job.resume)  # another run may have started meanwhile
    except OSError as error:
        raise UserError(f"the run cannot be written to {job.folder} ({error.strerror}); give another --out") from None


def make_and_lock_run_dir(folder: Path) -> None:
    """Make ``folder`` if it does not exist, and lock it as ``lock_run_dir`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    lock_run_dir(folder)


def lock_run_dir(folder: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Lock the run in ``folder``, if it exists, for this process until the process ends.

    Args:
        folder: Run directory.
        timeout_s: Seconds to wait for the lock, as for a rank that is about to notice that its launcher was killed.

    Raises:
        UserError: If another process trains there.
    """
    if not folder.is_dir() or folder.absolute() in _held:
        return
    deadline = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # filelock locks files alone, and would leave one in a directory that must end empty or be moved aside
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(f"{folder} is being trained by another process; stop that first") from None
            time.sleep(0.1)
            continue
        except OSError:  # a file system without locks, or, like NFS, without locks of directories
            pass
        if _is_at(folder, descriptor):
            _held.add(folder.absolute())
            return
        os.close(descriptor)  # the process that held it before removed it, empty
        folder.mkdir(parents=True, exist_ok=True)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        there = folder.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def check_replaceable(folder: Path) -> None:
    """Raise UserError if the run in ``folder``, which has no checkpoint, has results that would be lost."""
    reason = _result(folder)
    if reason:
        raise UserError(
            f"{folder} holds a run that {reason}, and no checkpoint to go on from; give another --out, or move that "
            "directory away"
        )


def _result(folder: Path) -> str:
    """Return what the run in ``folder`` has achieved, in words, or an empty string."""
    outcome: RunResult | None = None
    with suppress(UserError):  # damaged: the other files decide
        outcome = read_outcome(folder)
    if outcome is not None and outcome.status in ("reached", "finished"):
        return "has come to its end"
    if (folder / FINAL_WEIGHTS).exists():
        return f"has left {FINAL_WEIGHTS}"
    if had_none(folder / CHECKPOINTS):
        return ""
    if outcome is not None and outcome.status == "preempted" and outcome.steps:
        return "was saved when it was stopped"
    if (folder / "events.jsonl").exists() and any(event["event"] == "eval" for event in read_events(folder)):
        return "has been evaluated"
    return ""


def move_record_aside(folder: Path) -> None:
    """Move the record of an earlier run in ``folder`` to a new directory beside it, or else inside. Raises OSError."""
    old = [folder / name for name in _RECORD if (folder / name).exists() or (folder / name).is_symlink()]
    old += sorted(folder.glob(EVENT_FILES))
    if not old:
        return
    aside = _moved(old, folder)
    if any(path.name == "events.jsonl" for path in old):
        warn(f"{folder} holds a run that had come to no checkpoint; it is moved to {aside}, and begins again")
    else:
        warn(f"what an earlier run has left in {folder} is moved to {aside}")


def _moved(old: list[Path], folder: Path) -> Path:
    """Move the ``old`` files and return their new directory."""
    whole = folder.absolute()
    try:
        return _move_into(whole.parent, f"{whole.name}.replaced", old)
    except OSError:  # the directory is a mount point, or its parent is read-only
        return _move_into(whole, "replaced", old)


def _move_into(parent: Path, name: str, old: list[Path]) -> Path:
    for number in count(1):
        aside = parent / f"{name}-{number}"
        with suppress(FileExistsError):
            aside.mkdir()
            break
    try:
        for path in old:
            path.rename(aside / path.name)
    except OSError:
        with suppress(OSError):  # some files were moved to it
            aside.rmdir()
        raise
    return aside
