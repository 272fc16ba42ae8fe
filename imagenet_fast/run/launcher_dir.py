"""A launcher's directory: the job of its ranks, and what they leave for it; without torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.run.result import Status


class RankEnd(NamedTuple):
    """How a rank has ended, or that it has begun."""

    at: int
    """Nanoseconds since 1970."""
    pid: int
    status: Status | None
    """None: it has not ended, or was killed."""
    message: str
    code: int
    """1 if it has failed, 2 if the user can fix why, else 0."""


class LauncherDir:
    """The temporary directory of a launcher, for itself or one of its ranks. Every file in it has its name here."""

    def __init__(self, folder: Path, local_rank: int = 0) -> None:
        """Name the files in ``folder``, where the rank with this number on the node leaves its own."""
        self.folder = folder
        self.opened = folder / "opened"
        """File that is there once rank 0, on this node, has begun to write the run directory."""
        self.final = folder / "final"
        """File that is there once ranks that had met have reported a user error: they would end so again."""
        self.results = folder / "results.json"
        """File to which rank 0 writes what `doctor` has found."""
        self.heartbeat = folder / f"heartbeat-{local_rank}.json"
        """File with the last position of the rank."""
        self._end = folder / f"rank-{local_rank}.json"

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[LauncherDir]:
        """Make one for the block."""
        with TemporaryDirectory(prefix="imagenet-fast-") as folder:
            yield cls(Path(folder))

    def job(self, task: str) -> Path:
        """Return the file of the job of this ``task``."""
        return self.folder / f"{task}.json"

    def forget(self) -> None:
        """Remove what the rank left before torchrun restarted it."""
        self._end.unlink(missing_ok=True)

    def leave(self, status: Status | None = None, message: str = "", code: int = 0) -> None:
        """Leave how the rank ends, or that it has begun."""
        with suppress(OSError):  # the launcher has ended
            end = RankEnd(time.time_ns(), os.getpid(), status, message, code)
            atomic_write_text(self._end, json.dumps(end), shared=True)

    def ends(self) -> list[RankEnd]:
        """Return how ranks have ended, the first one first, without those that were killed."""
        return sorted(end for end in self._ranks() if end.status is not None)

    def lost_rank(self) -> bool:
        """Return whether a rank was killed, for which torchrun stops the others."""
        return any(end.status is None and not Path(f"/proc/{end.pid}").exists() for end in self._ranks())

    def _ranks(self) -> list[RankEnd]:
        return [RankEnd(*json.loads(file.read_bytes())) for file in self.folder.glob("rank-*.json")]
