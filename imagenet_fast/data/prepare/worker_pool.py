"""Threads that make pieces and report progress; a finished piece is kept at once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress, TaskID

from imagenet_fast.data.prepare.output_layout import Listed, list_class
from imagenet_fast.data.prepare.source_files import SourceClass
from imagenet_fast.data.prepare.staging_dir import SPLITS, Made, Piece, StagingDir
from imagenet_fast.errors import UserError


@dataclass(frozen=True)
class WorkerPool:
    """Threads that make the pieces of ``source`` in the staging directory ``staging``, until ``stop`` is set."""

    staging: StagingDir
    source: Path
    pool: Executor
    bars: Progress
    stop: threading.Event

    def kept(self, pieces: Sequence[Piece]) -> dict[Piece, Made]:
        """Return the pieces that were made before.

        Raises:
            UserError: Other pieces were made before, from another source.
        """
        known = {(piece.split, piece.name): piece for piece in pieces}
        kept = {}
        for entry in self.staging.noted():
            piece = known.get((entry.split, entry.name))
            if piece is None or (piece.files, piece.size) != (entry.files, entry.made.size):
                raise UserError(
                    f"{self.staging.out} was begun from another source than {self.source}, by "
                    f"{entry.split}/{entry.name}; give that one or another --out, or remove {self.staging.folder}"
                )
            kept[piece] = entry.made
        return kept

    def list(self, classes: Mapping[SourceClass, int]) -> dict[SourceClass, Listed]:
        """Return the files of each class. For tars this reads all headers."""
        task = self.bars.add_task("listing", total=sum(classes.values()))

        def look(of: SourceClass) -> Listed:
            self._tell(task, 0)
            found = list_class(of)
            self._tell(task, classes[of])
            return found

        return dict(zip(classes, self.pool.map(look, classes), strict=True))

    def _tell(self, task: TaskID, read: int) -> None:
        """Advance a progress bar. Raises CancelledError if all work is to stop."""
        if self.stop.is_set():
            raise CancelledError
        self.bars.advance(task, read)

    def make(self, pieces: Sequence[Piece], kept: Mapping[Piece, Made]) -> dict[Piece, Made]:
        """Make the ``pieces`` that are not ``kept``, and return the results of all pieces, in their order."""
        rest = [piece for piece in pieces if piece not in kept]
        tasks = {
            split: self.bars.add_task(split, total=size, images=0)
            for split in SPLITS
            if (size := sum(piece.size for piece in rest if piece.split == split))
        }
        pending = {
            self.pool.submit(self.staging.make, piece, partial(self._tell, tasks[piece.split])): piece for piece in rest
        }
        made, images = dict(kept), dict.fromkeys(SPLITS, 0)
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            ready = {pending[future]: future.result() for future in done if future.exception() is None}
            self.staging.keep(ready)
            for future in done:
                future.result()
                del pending[future]
            for piece, what in ready.items():
                images[piece.split] += what.images
                self.bars.update(tasks[piece.split], images=images[piece.split])
            made |= ready
        return {piece: made[piece] for piece in pieces}
