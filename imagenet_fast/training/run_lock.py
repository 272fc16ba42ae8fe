"""Lock a run directory for one run at a time.

It is locked before anything in it is written. An earlier run without checkpoints is moved aside, never deleted.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from imagenet_fast.atomic_io import check_place
from imagenet_fast.checkpoint.folder import read_survey
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import raise_on_all_ranks
from imagenet_fast.errors import UserError, warn
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.recipe.job import Job

_LOCK_TIMEOUT_S = 5.0  # for another process to release the lock: a rank needs a moment to see that its launcher died
_held: dict[Path, int] = {}  # the descriptors, which are never closed


@contextmanager
def claimed(job: Job, world: DistContext) -> Iterator[None]:
    """Make the directory of ``job`` and lock it for this run, on rank 0; before this the run has written nothing.

    A run that is to be resumed and has no checkpoint is moved aside, and begins again. At the end, remove the directory
    if nothing was written to it.

    Raises:
        UserError: On every rank, if another process trains there, or a run is there that ``job`` must not resume or
            that cannot be moved aside.
    """
    try:
        with raise_on_all_ranks(world.device):
            if world.is_main:
                _claim(job)
        yield
    finally:
        if world.is_main:
            with suppress(OSError):  # the directory is not empty
                job.folder.rmdir()


def _claim(job: Job) -> None:
    run = RunDir(job.folder)
    try:
        run.check_writable(job.resume)
        _make_and_lock(job.folder)
        run.check_writable(job.resume)  # another run may have started meanwhile
        if run.holds_run() and not any(read_survey(run.checkpoints)):
            _move_aside(job.folder)
            _make_and_lock(job.folder)
    except OSError as error:
        raise UserError(f"the run cannot be written to {job.folder} ({error.strerror}); give another --out") from None


def _move_aside(folder: Path) -> None:
    """Rename the locked ``folder``, or raise UserError."""
    whole = folder.absolute()
    aside = next(path for n in count(1) if not (path := whole.with_name(f"{whole.name}.replaced-{n}")).exists())
    try:
        whole.rename(aside)
    except OSError as error:  # a mount point, for example
        raise UserError(
            f"{folder} holds a run without a checkpoint to go on from, and cannot be moved to {aside} "
            f"({error.strerror}); move what is in it away, or give another --out"
        ) from None
    _held.pop(whole)
    warn(f"{folder} holds a run that had come to no checkpoint; it is moved to {aside}, and begins again")


def _make_and_lock(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lock_run_dir(folder)


def lock_run_dir(folder: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Lock the run in ``folder``, if it exists, for this process until the process ends.

    Raises:
        UserError: Another process trains there, and goes on for ``timeout_s``.
    """
    if not folder.is_dir():
        return
    with suppress(KeyError, FileNotFoundError):  # not locked, or another one now
        check_locked(folder)
        return
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
            check_place(folder, os.fstat(descriptor))
            _held[folder.absolute()] = descriptor
            return
        os.close(descriptor)  # the process that held it before removed it, empty
        folder.mkdir(parents=True, exist_ok=True)


def check_locked(folder: Path) -> None:
    """Raise FileNotFoundError if ``folder`` is not the directory that this process has locked under that name."""
    check_place(folder, os.fstat(_held[folder.absolute()]))
