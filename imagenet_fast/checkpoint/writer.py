"""Write checkpoints in a thread of each rank while training continues.

Ranks agree on one by messages: rank 0 posts the digest of its own part, each the sums of what it has written, and rank
0 the verdict. They are posted with a client of the store of the thread's own, so training neither waits for it nor
shares its connection. A gloo group could send them, but has a socket to every other rank. A gather on the training
thread would be needed at every step, and the last checkpoint would not be complete until the next one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from imagenet_fast.checkpoint import folder as folders
from imagenet_fast.checkpoint.folder import SHARED, FileSum, Manifest, Stamp, part_name, write_durably
from imagenet_fast.checkpoint.tree import HostCopy, Tree
from imagenet_fast.distributed.board import Board, background_client
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import JobAborted, UserError, warn

_PRIORITY = 10  # a niceness: the thread gets a tenth of another's share of a busy core
_LEAVING_S = 5.0  # seconds for the thread to see that it is to stop
_FOR_RANK_0 = 5  # times as long others wait for rank 0: it writes the shared file, then waits for all
_MAKE_ROOM = "free space there"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM, errno.EDQUOT: _MAKE_ROOM, errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "make it writable", errno.EACCES: "make it writable", errno.EPERM: "make it writable",
    errno.ENOMEM: "give ranks more memory, or raise `ulimit -l`",
    errno.ENOENT: "have every node see that directory, and nobody remove it",
}  # fmt: skip


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are as they were."""

    def __init__(self, failure: str, then: str) -> None:
        """Say what failed and what the user can do about it, and what to do ``then`` if the run ends."""
        super().__init__(f"{failure}, then {then}")
        self.in_short = failure
        """The message without what to do if the run ends."""


class _Leaving(Exception):
    """This rank gives up the checkpoint, because its training has ended otherwise."""


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writer of a run's checkpoints, in a thread of each rank.

    Each rank makes one, once, and calls ``save`` and ``wait`` at the same steps as the others, not before rank 0 has
    made its own. A rank holds one copy of what it saves in host memory.

    A second ``save`` waits for the first: to skip it, ranks would have to agree. A caller that prefers to skip checks
    ``under_way`` on one rank, and sends the result to the others along with whether a checkpoint is due.
    """

    def __init__(
        self, root: Path, place: RankInfo, store: Store | None = None, keep: int = 1,
        timeout: timedelta = timedelta(minutes=10), check_root: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Remove what killed writes have left under ``root``, on rank 0.

        Args:
            root: Directory of the checkpoints, which is there, and which all ranks see.
            place: This rank.
            store: Store at which the ranks met; None: one of this process alone.
            keep: Checkpoints kept besides the newest and the best.
            timeout: A checkpoint fails if a rank takes this much longer than rank 0 to write its part.
            check_root: Raises OSError once another run's directory has the name of ``root``; called before writing.
        """
        self._root = root
        self._check_root = check_root
        self._place = place
        self._store = HashStore() if store is None else background_client(store)
        self._keep = keep
        self._timeout_s = timeout.total_seconds()
        self._copies = defaultdict[str, HostCopy](HostCopy)
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._written: Path | None = None
        self.written_step = 0
        """Step of the last complete checkpoint; 0 before the first."""
        self._failure: Exception | None = None
        if place.is_main:
            _tidied(lambda: folders.sweep(root))

    def alone(self) -> CheckpointWriter:
        """Return a writer for this rank without the others, which writes what a run of one rank would."""
        return CheckpointWriter(self._root, RankInfo(0, 1, 0, 1), keep=self._keep, check_root=self._check_root)

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        """Copy the trees as they are now, and write them in the background: ``shared`` by rank 0, ``own`` by this rank.

        Where one is None, nothing is written, nor an ``own`` that is the same as rank 0's. It first does ``wait``,
        whose errors are of the checkpoint before.
        """
        self.wait()
        trees = {SHARED: shared if self._place.is_main else None, part_name(self._place.rank): own}
        given = {name: tree for name, tree in trees.items() if tree is not None}
        copied = self._tried(lambda: {name: self._copies[name].take(tree) for name, tree in given.items()})
        self._saves += 1
        thread = threading.Thread(target=self._save, args=(self._saves, stamp, copied), daemon=True)
        thread.start()
        self._thread = thread

    @property
    def under_way(self) -> bool:
        """Whether ``save`` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete and return its directory; None before the first.

        The rank moves meanwhile, for as long as a rank may take to write: a slow disk is no hang.

        Raises:
            NotSaved: On all ranks alike, if it could not be written. Earlier checkpoints are as they were.
            JobAborted: Rank 0, or its store, is gone.
        """
        until = time.monotonic() + self._timeout_s
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            if time.monotonic() < until:
                here.move()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._written

    def close(self) -> None:
        """Give up the checkpoint that is being written, and wait for its thread, up to 5 s.

        The thread must end before Python does: when the store call returns, it would abort the process.
        """
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(_LEAVING_S)

    def __exit__(self, kind: object, error: object, where: object) -> None:
        """Wait for the last checkpoint, unless after an error: other ranks may then never write theirs."""
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    def _save(self, number: int, stamp: Stamp, copied: dict[str, Any]) -> None:
        """Write the files of which ``copied`` tells, in the thread, and hear or say what comes of the checkpoint."""
        folder, lost = folders.unfinished(self._root, stamp.step), f"the checkpoint of step {stamp.step} was given up"
        try:
            with suppress(OSError):  # a process may be forbidden to; on Linux each thread has a niceness
                thread = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _PRIORITY))
            board = Board(self._store, f"checkpoint/{number}", self._pause)
            part = (
                copied
                if "failure" in copied
                else self._tried(lambda: {name: [*pieces] for name, pieces in copied["content"].items()})
            )
            files: dict[str, list[bytes | memoryview]] = part.get("content", {})
            same = self._is_rank_0s(board, files.get(part_name(self._place.rank), []))
            part = part if "failure" in part else self._tried(lambda: self._write(folder, {} if same else files))
            board.post(f"part/{self._place.rank}", part | {"same": same})
            if self._place.is_main:
                board.post("verdict", self._judge(board, folder, stamp))
            verdict = board.read("verdict", time.monotonic() + _FOR_RANK_0 * self._timeout_s)
            if verdict is None:
                raise JobAborted(f"{lost}, as rank 0 does not answer; see its output")
            if board.count("read") == self._place.size:
                board.remove("verdict", "read", "own", *(f"part/{rank}" for rank in range(self._place.size)))
            if "failure" in verdict:
                raise NotSaved(f"the checkpoint of step {stamp.step} failed: {verdict['failure']}", verdict["then"])
            self._written, self.written_step = self._root / verdict["content"], stamp.step
        except _Leaving:
            return
        except dist.DistError:
            self._failure = JobAborted(f"{lost}, as the store where the ranks met is gone; see the output of rank 0")
        except Exception as error:
            self._failure = error

    def _is_rank_0s(self, board: Board, own: Sequence[bytes | memoryview]) -> bool:
        """Return whether a part is that of rank 0, too, as after an evaluation, which averages statistics of norms."""
        summed = hashlib.blake2b(digest_size=16)
        for piece in own:
            summed.update(piece)
        digest = summed.hexdigest() if own else "none"
        if self._place.is_main:
            board.post("own", digest)
            return False
        return bool(own) and digest == board.read("own", time.monotonic() + self._timeout_s)

    def _write(self, folder: Path, files: Mapping[str, Sequence[bytes | memoryview]]) -> dict[str, Any]:
        """Write ``files`` into ``folder`` and return their sums."""
        self._check_root()
        folder.mkdir(exist_ok=True)
        return {
            name: write_durably(folder / name, map(self._passed, pieces)).model_dump() for name, pieces in files.items()
        }

    def _judge(self, board: Board, folder: Path, stamp: Stamp) -> dict[str, Any]:
        """Make a checkpoint of ``folder`` once all ranks have written, or remove it, and return the verdict."""
        parts = board.gather("part", range(self._place.size), time.monotonic() + self._timeout_s)
        failed = [part for part in parts.values() if "failure" in part]
        if late := [str(rank) for rank in range(self._place.size) if rank not in parts]:
            failure = f"rank {', '.join(late)} did not write its part within {self._timeout_s:g} s"
            failed = [{"failure": failure, "remedy": "see its output, and whether its disk is slow"}]
        if not failed:
            made = self._tried(lambda: self._complete(folder, stamp, parts))
            if "failure" not in made:
                return made
            failed = [made]
        before: dict[Path, Manifest] = {}
        with suppress(OSError):
            self._check_root()
            shutil.rmtree(folder)
        with suppress(OSError):
            before, _ = folders.survey(self._root)
        remedy, more = failed[0]["remedy"], f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        if remedy == _MAKE_ROOM:
            _tidied(lambda: folders.retain(before, 0))
        then = next((f"resume from {last.name}" for last in before), "start again")
        return {"failure": f"{failed[0]['failure']}{more}; {remedy}", "then": then}

    def _complete(self, folder: Path, stamp: Stamp, parts: Mapping[int, Any]) -> str:
        """Make a checkpoint of ``folder``, remove others for it, and return its name.

        Others are told afterwards: those that train on would wait in vain for a rank that still removes.
        """
        before, _ = folders.survey(self._root)
        number = 1 + max((manifest.number for manifest in before.values()), default=0)
        files = {name: FileSum(**found) for part in parts.values() for name, found in part["content"].items()}
        same = tuple(rank for rank, part in parts.items() if part["same"])
        manifest = Manifest(**dict(stamp), number=number, files=files, same=same)
        made = folders.finish(folder, manifest)
        _tidied(lambda: folders.retain({made: manifest, **before}, self._keep))
        return made.name

    def _tried(self, attempt: Callable[[], Any]) -> dict[str, Any]:
        """Return the result of ``attempt``, or its failure, as a message for the other ranks."""
        who = f"rank {self._place.rank} on {socket.gethostname()}: " if self._place.size > 1 else ""
        try:
            return {"content": attempt()}
        except _Leaving:
            raise
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "see to that disk")
            return {"failure": f"{who}{error.filename} cannot be written ({error.strerror})", "remedy": remedy}
        except Exception as error:  # else a bug of ours would leave the other ranks waiting
            return {"failure": f"{who}{type(error).__name__}: {error}", "remedy": "report this"}

    def _pause(self, seconds: float) -> None:
        if self._leaving.wait(seconds):
            raise _Leaving

    def _passed(self, piece: bytes | memoryview) -> bytes | memoryview:
        self._pause(0.0)
        return piece


def _tidied(attempt: Callable[[], object]) -> None:
    """Run ``attempt``, which removes files that are no longer needed; if it fails, warn and go on."""
    try:
        attempt()
    except OSError as error:
        warn(f"{error.filename} cannot be removed ({error.strerror}); remove it by hand")
