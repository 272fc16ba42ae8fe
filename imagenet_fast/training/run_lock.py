"""Lock a run directory for one run at a time, and say what a run that resumes finds there.

It is locked before anything in it is written. An earlier run without checkpoints is moved aside, never deleted, and a
finished one is never trained again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import torch.distributed as dist

from imagenet_fast.atomic_io import check_place
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.messages import raise_on_all_ranks
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.result import RunResult, read_outcome, verdict
from imagenet_fast.run.run_dir import RunDir

_LOCK_TIMEOUT_S = 5.0  # for another process to release the lock: a rank needs a moment to see that its launcher died
_held: dict[Path, int] = {}  # the descriptors


@contextmanager
def claimed(job: Job, world: DistContext) -> Iterator[RunResult | None]:
    """Make the directory of ``job`` and lock it for the block, on rank 0; before this the run has written nothing.

    At the end, remove the directory if nothing was written to it.

    Yields:
        The result of the run there if it has ended, by the same recipe, and has its final weights; else None.

    Raises:
        UserError: On every rank, if another process trains there, or a run is there that ``job`` must not resume.
    """
    ended: list[RunResult | None] = [None]
    try:
        with raise_on_all_ranks():
            if world.is_main:
                ended = [_claim(job)]
        dist.broadcast_object_list(ended, device=world.device)
        yield ended[0]
    finally:
        if job.folder.absolute() in _held:
            with suppress(OSError):  # the directory is not empty
                job.folder.rmdir()
            _unlock(job.folder)


def _claim(job: Job) -> RunResult | None:
    run = RunDir(job.folder)
    try:
        run.check_writable(job.resume)
        _make_and_lock(job.folder)
        run.check_writable(job.resume)  # another run may have started meanwhile
    except OSError as error:
        raise UserError(f"the run cannot be written to {job.folder} ({error.strerror}); give another --out") from None
    return ended_run(job)


def ended_run(job: Job) -> RunResult | None:
    """Return the result of the run in the directory of ``job`` if it has ended, by the same recipe; else None."""
    run = RunDir(job.folder)
    with suppress(UserError):  # its job is damaged
        return _result(run) if run.job.is_file() and run.read_job().recipe == job.recipe else None
    return None


def describe_ended(job: Job, ended: RunResult) -> str:
    """Describe what the run in the directory of ``job`` has reached, which ``ended_run`` has found."""
    run = RunDir(job.folder)
    return f"{verdict(vars(ended))}\n{run.folder} had ended so; its weights are {run.final_weights}"


def _result(run: RunDir) -> RunResult | None:
    """Return the result of a run that has come to its end and has its final weights; None for others."""
    with suppress(UserError):  # damaged
        if run.final_weights.is_file() and (ended := read_outcome(run.folder)) is not None:
            return ended if ended.status in ("reached", "finished") else None
    return None


def make_room(job: Job) -> None:
    """Move aside a run in the locked directory of ``job``, which has no checkpoint to go on from; then lock again.

    Raises:
        UserError: It has come to its end, or cannot be moved.
    """
    run, whole = RunDir(job.folder), job.folder.absolute()
    if not run.holds_run():
        return
    if _result(run) is not None:
        raise UserError(
            f"{job.folder} holds a run that has ended, and no checkpoint from which it could go on; give another "
            f"--out, with --init-from {job.folder} to start from its weights"
        )
    aside = next(path for n in count(1) if not (path := whole.with_name(f"{whole.name}.replaced-{n}")).exists())
    try:
        whole.rename(aside)
    except OSError as error:  # a mount point, for example
        raise UserError(
            f"{job.folder} holds a run without a checkpoint to go on from, and cannot be moved to {aside} "
            f"({error.strerror}); move what is in it away, or give another --out"
        ) from None
    warn(f"{job.folder} holds a run that had come to no checkpoint; it is moved to {aside}, and begins again")
    _unlock(job.folder)
    _make_and_lock(job.folder)


def _make_and_lock(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run in ``folder`` for the block. Raises UserError if another process trains there, OSError."""
    _lock(folder, timeout_s=0.0)
    try:
        yield
    finally:
        _unlock(folder)


def _unlock(folder: Path) -> None:
    with suppress(KeyError):  # another process has taken it
        os.close(_held.pop(folder.absolute()))


def _lock(folder: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Lock the run in ``folder`` for this process. Raises UserError if another one trains there for ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # the directory itself: a file would be left in one that must end empty or be moved aside
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(f"{folder} is being trained by another process; stop that first") from None
            time.sleep(0.1)
            continue
        except OSError:  # a file system without locks, or, like NFS, without locks of directories
            pass
        with suppress(FileNotFoundError):
            check_place(folder, descriptor)
            _held[folder.absolute()] = descriptor
            return
        os.close(descriptor)  # the process that held it before removed it, empty
        folder.mkdir(parents=True, exist_ok=True)


def check_locked(folder: Path) -> None:
    """Raise FileNotFoundError if ``folder`` is not the directory that this process holds locked under that name."""
    check_place(folder, _held.get(folder.absolute(), -1))
