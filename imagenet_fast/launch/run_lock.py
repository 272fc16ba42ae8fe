"""A run directory belongs to one run at a time: it is locked before anything in it is written, and the record of an
earlier run is moved aside, never deleted."""

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
from imagenet_fast.distributed.reductions import broadcast_error
from imagenet_fast.errors import UserError, warn
from imagenet_fast.launch.job_setup import check_writable
from imagenet_fast.metrics.jsonl import read_events
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.recipe.job import Job

CHECKPOINTS = "checkpoints"
"""In a run directory."""

_PATIENCE_S = 5.0  # for another process to let go: a rank whose launcher was killed needs a moment to see that
_RECORD = (
    "events.jsonl", "mllog.txt", "outcome.json", "job.json", "recipe.toml", "environment.json", "trace.json", "tb",
)  # fmt: skip
_held: set[Path] = set()


@contextmanager
def claimed(job: Job, world: DistContext) -> Iterator[None]:
    """Make the directory of ``job`` and lock it for this run, on rank 0; until here the run has written nothing.

    Raises UserError, on every rank, where another process trains there, or a run lies there that ``job`` is not to go
    on with. A directory in which nothing was written is removed at the end.
    """
    refusal = ""
    if world.is_main:
        try:
            check_writable(job.folder, job.resume)
            make_and_hold(job.folder)
            check_writable(job.folder, job.resume)  # another run may have begun meanwhile
        except UserError as error:
            refusal = str(error)
        except OSError as error:
            refusal = f"the run cannot be written to {job.folder} ({error.strerror}); give another --out"
    try:
        if refusal := broadcast_error(refusal, world.device):
            raise UserError(refusal)
        yield
    finally:
        if world.is_main:
            with suppress(OSError):  # it is not empty
                job.folder.rmdir()


def make_and_hold(folder: Path) -> None:
    """Make ``folder`` if it is not there, and :func:`hold` it."""
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)


def hold(folder: Path, patience_s: float = _PATIENCE_S) -> None:
    """Keep the run in ``folder``, if there is one, to this process until it ends.

    Raises UserError where another one trains it, such as a rank whose launcher has been killed and which is about to
    notice.
    """
    if not folder.is_dir() or folder.absolute() in _held:
        return
    deadline = time.monotonic() + patience_s
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(f"{folder} is being trained by another process; stop that first") from None
            time.sleep(0.1)
            continue
        except OSError:  # a file system without locks, or, as NFS, without those of directories
            pass
        if _is_at(folder, descriptor):
            _held.add(folder.absolute())
            return
        os.close(descriptor)  # whoever had it before has removed it, empty
        folder.mkdir(parents=True, exist_ok=True)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        there = folder.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def check_replaceable(folder: Path) -> None:
    """Raise UserError where the run in ``folder``, of which there is no checkpoint, has results to lose."""
    reason = _result(folder)
    if reason:
        raise UserError(
            f"{folder} holds a run that {reason}, and no checkpoint to go on from; give another --out, or move that "
            "directory away"
        )


def _result(folder: Path) -> str:
    """What the run in ``folder`` has come to, in words; nothing where it has come to nothing."""
    outcome: RunResult | None = None
    with suppress(UserError):  # damaged: the other files tell
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
    """Make room for the record of a new run in ``folder``: what is there of an earlier one goes into a directory of its
    own beside it, or inside where nothing can be put beside it. Raises OSError."""
    old = [folder / name for name in _RECORD if (folder / name).exists() or (folder / name).is_symlink()]
    if not old:
        return
    aside = _moved(old, folder)
    if any(path.name == "events.jsonl" for path in old):
        warn(f"{folder} holds a run that had come to no checkpoint; it is moved to {aside}, and begins again")
    else:
        warn(f"what an earlier run has left in {folder} is moved to {aside}")


def _moved(old: list[Path], folder: Path) -> Path:
    """Where the ``old`` files are now."""
    whole = folder.absolute()
    try:
        return _move_into(whole.parent, f"{whole.name}.replaced", old)
    except OSError:  # the directory is a volume of its own, or nothing may be written beside it
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
        with suppress(OSError):  # something is in it
            aside.rmdir()
        raise
    return aside
