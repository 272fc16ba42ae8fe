"""Write checkpoints in a thread while training continues."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from imagenet_fast.checkpoint.commit import tidied, write_checkpoint
from imagenet_fast.checkpoint.manifest import SHARED, Stamp, part_name
from imagenet_fast.checkpoint.retention import retain, sweep
from imagenet_fast.checkpoint.serialization import Tree
from imagenet_fast.checkpoint.staging import StagingBuffer
from imagenet_fast.checkpoint.store_coordination import Leaving, RankTimeout, StoreCoordinator
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.errors import UserError

_PRIORITY = 10  # a niceness: the thread gets a tenth of another's share of a busy core
_LEAVING_S = 5.0  # seconds for the thread to see that it is to stop


class CheckpointWriter:
    """Writer of a run's checkpoints, in a thread of each rank.

    Each rank makes one, once, and calls ``save`` and ``wait`` at the same steps as the others. A rank holds one copy of
    what it saves in host memory. The newest checkpoint, the best one and ``keep`` others are kept.

    A second ``save`` waits for the first: to skip it, ranks would have to agree. A caller that prefers to skip checks
    ``under_way`` on one rank, and sends the result to the others along with whether a checkpoint is due.
    """

    def __init__(
        self,
        root: Path,
        place: RankInfo,
        store: Store | None = None,
        keep: int = 1,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        """Remove what killed writes have left under ``root``, and old checkpoints, on rank 0.

        Args:
            root: Directory of the checkpoints, which all ranks see, maybe by different paths.
            place: This rank.
            store: Store at which the ranks met; None: one of this process alone.
            keep: Checkpoints kept besides the newest and the best.
            timeout: A checkpoint fails if a rank takes this much longer than rank 0 to write its part.
        """
        self._root = root
        self._place = place
        self._store = PrefixStore("checkpoint", (store or HashStore()).clone())
        self._keep = keep
        self._timeout_s = timeout.total_seconds()
        self._copies: dict[str, StagingBuffer] = {}
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._written: Path | None = None
        self.written_step = 0
        """Step of the last complete checkpoint; 0 before the first."""
        self._failure: Exception | None = None
        if place.is_main:
            tidied(lambda: sweep(root))
            tidied(lambda: retain(root, keep))

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        """Copy the trees as they are now, and write them in the background.

        It first waits for the previous checkpoint.

        Args:
            stamp: The step and the run.
            shared: Tree that rank 0 writes; None: no tree.
            own: Tree that this rank writes; None: no tree.

        Raises:
            NotSaved: As ``wait``, for the previous checkpoint.
            UserError: As ``wait``, for the previous checkpoint.
            TypeError: A tree holds what it cannot, as in ``flatten_tree``.
        """
        self.wait()
        trees = {SHARED: shared if self._place.is_main else None, part_name(self._place.rank): own}
        files = {}
        for name, tree in trees.items():
            if tree is not None:
                copy = self._copies.setdefault(name, StagingBuffer())
                copy.take(tree)
                files[name] = self._unless_leaving(copy.chunks())
        self._saves += 1
        self._thread = threading.Thread(target=self._write, args=(self._saves, stamp, files), daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether ``save`` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for the checkpoint that is being written, if any, for at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete and return its directory; None before the first.

        Raises:
            NotSaved: On all ranks alike, if it could not be written. Earlier checkpoints are as they were.
            UserError: Rank 0, or its store, is gone.
        """
        if self._thread is not None:
            self._thread.join()
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

    def __enter__(self) -> CheckpointWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Wait for the last checkpoint, unless after an error: other ranks may then never write theirs."""
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    def _write(self, number: int, stamp: Stamp, files: dict[str, Iterable[bytes | memoryview]]) -> None:
        """Write the checkpoint, in the thread."""
        lost = f"the checkpoint of step {stamp.step} was given up"
        try:
            _yield_cores()
            coordinator = StoreCoordinator(PrefixStore(str(number), self._store), self._place.size, self._leaving)
            self._written = write_checkpoint(
                self._root, self._place, coordinator, stamp, files, self._keep, self._timeout_s
            )
            self.written_step = stamp.step
        except Leaving:
            return
        except RankTimeout:
            self._failure = UserError(f"{lost}, as rank 0 does not answer; see its output")
        except dist.DistError:
            self._failure = UserError(f"{lost}, as the store where the ranks met is gone; see the output of rank 0")
        except Exception as error:
            self._failure = error

    def _unless_leaving(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            if self._leaving.is_set():
                raise Leaving
            yield chunk


def _yield_cores() -> None:
    """Give this thread a niceness of ``_PRIORITY`` or more, so that training goes first; on Linux threads have one."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):  # a process may be forbidden to
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(now, _PRIORITY))  # only root may lower it
