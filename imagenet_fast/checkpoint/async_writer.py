"""Checkpoints written by a thread, while training goes on."""

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
from imagenet_fast.checkpoint.retention import set_aside, sweep
from imagenet_fast.checkpoint.serialization import Tree
from imagenet_fast.checkpoint.staging import StagingBuffer
from imagenet_fast.checkpoint.store_coordination import Leaving, RankTimeout, StoreCoordinator
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.errors import UserError

_PRIORITY = 10  # a tenth of another thread's share of a busy core
_LEAVING_S = 5.0  # for the thread to see that it need not go on


class CheckpointWriter:
    """Writes the checkpoints of a run under ``root``, which all ranks see, maybe by different paths.

    All ranks make one, once, with the store they met at, and call :meth:`save` and :meth:`wait` at the same steps. A
    rank holds one copy of what it saves in host memory. Of the checkpoints there are, the newest, the best and ``keep``
    others stay. A checkpoint fails where a rank takes longer by ``patience`` than rank 0 to write its part.

    A second :meth:`save` waits for the first: to leave one out, ranks would have to agree on it. Who would rather do
    that asks :attr:`under_way` on one rank, and tells the others together with whether a checkpoint is due.
    """

    def __init__(
        self,
        root: Path,
        place: RankInfo,
        store: Store | None = None,
        keep: int = 1,
        patience: timedelta = timedelta(minutes=10),
    ) -> None:
        self._root = root
        self._place = place
        self._store = PrefixStore("checkpoint", (store or HashStore()).clone())
        self._keep = keep
        self._patience_s = patience.total_seconds()
        self._copies: dict[str, StagingBuffer] = {}
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._known: dict[Path, bool] = {}
        self._written: Path | None = None
        self.written_step = 0
        """The step of the last complete checkpoint; 0 before the first."""
        self._failure: Exception | None = None
        if place.is_main:
            tidied(lambda: sweep(root))

    def save(self, stamp: Stamp, shared: Tree, own: Tree = None) -> None:
        """Copy the trees as they are now, and have them written: ``shared`` by rank 0, ``own`` by every rank.

        None is no tree. First waits for the checkpoint before, and raises what :meth:`wait` raises.
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
    def failure(self) -> Exception | None:
        """Why the last checkpoint could not be written, before :meth:`wait` raises it."""
        return None if self.under_way else self._failure

    @property
    def under_way(self) -> bool:
        """Whether :meth:`save` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """The last checkpoint, once it is complete; None before the first.

        Raises NotSaved, on all ranks alike, where it could not be written; those before it are as they were. Raises
        UserError where rank 0 is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._written

    def set_aside(self, step: int) -> int | None:
        """There will be no further :meth:`save`, and nobody is to go on from ``step`` or later, if there is a
        checkpoint from before. The step of the newest that is left, on rank 0; None where there is none."""
        with suppress(UserError):  # that the last one could not be written is the lesser evil
            self.wait()
        left: list[int | None] = [None]
        if self._place.is_main:
            tidied(lambda: left.append(set_aside(self._root, step)))
        return left[-1]

    def close(self) -> None:
        """Give up what is under way. The thread must end before Python does: coming back from the store, it would
        abort the process."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(_LEAVING_S)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Wait for the last checkpoint, unless after an error, when other ranks may never write theirs."""
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    def _write(self, number: int, stamp: Stamp, files: dict[str, Iterable[bytes | memoryview]]) -> None:
        """In the thread."""
        if sys.platform == "linux":  # where a thread has a priority of its own: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        letters = StoreCoordinator(PrefixStore(str(number), self._store), self._place.size, self._leaving)
        lost = f"the checkpoint of step {stamp.step} was given up"
        try:
            self._written = write_checkpoint(
                self._root, self._place, letters, stamp, files, self._keep, self._patience_s, self._known
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
