"""How this rank's part of a run ends, and where that is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from imagenet_fast.distributed.failure_detection import leave_failure, reported_failure
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.metrics.run_result import NOTHING_LOST, STOPPED_WORDS, RunResult
from imagenet_fast.recipe.job import Job

OPENED, TOLD = "opened", "told"
"""Files in a launcher's folder: rank 0 has begun to write the run directory; rank 0 has printed how the run ended."""

_TELLING_S = 2.0  # for a store that may be gone


class Ending:
    """How a run ends: rank 0 leaves the outcome in the run directory after :meth:`begin_record`, the first rank of each
    node, or whoever has something to say, in the launcher's folder ``handover``."""

    def __init__(self, job: Job, place: RankInfo, handover: Path | None) -> None:
        self.outcome = RunResult.beginning(job)
        self.saved_step: Callable[[], int] = lambda: 0
        """From which the run would go on now."""
        self._job = job
        self._place = place
        self._handover = handover
        self._opened = False
        self._told = False
        self.ended = False

    def begin_record(self) -> None:
        """The run directory is this run's, and rank 0 writes there from now on."""
        self._opened = True
        if self._place.is_main and self._handover is not None:
            (self._handover / OPENED).touch()

    def told(self) -> None:
        """The outcome has been printed."""
        self._told = True
        if self._place.is_main and self._handover is not None:
            with suppress(OSError):
                (self._handover / TOLD).touch()

    def stop(self, why: str = "") -> None:
        """A signal ends this rank before all have saved together; others may not have been told, and are."""
        reported = reported_failure() if dist.is_initialized() else ""
        if reported and not reported.startswith(STOPPED_WORDS):  # torchrun has stopped this rank after another failed
            self.fail(reported)
            return
        self._stop(why)
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            telling = threading.Thread(target=_tell, args=(store, self.outcome.message), daemon=True)
            telling.start()
            telling.join(_TELLING_S)

    def late(self) -> int:
        """Time is up after a signal: the exit code, from a thread beside the one that trains, which may be stuck."""
        if not self.ended:
            key = f"checkpoint.grace_s {self._job.recipe.checkpoint.grace_s:g}"
            self._stop(f"within the time that {key} allows")
            self.leave()
        return self.outcome.exit_code

    def fail(self, reason: str) -> None:
        """The run ends for ``reason``, this rank's or another's."""
        self.outcome.message = reason
        self.outcome.status = "failed"
        if reason.startswith(STOPPED_WORDS):
            self.outcome.status = "preempted" if reason == NOTHING_LOST else "interrupted"

    def leave(self) -> None:
        """Write the outcome; print it where nobody else does."""
        self.ended = True
        outcome, place = self.outcome, self._place
        if place.is_main and self._opened and self._job.folder.is_dir():
            with suppress(OSError):  # of a full disk there is a sentence already, and another place to leave it
                outcome.write(self._job.folder)
        if self._handover is None:
            if place.is_main and not self._told and outcome.status in ("preempted", "interrupted"):
                print(outcome.message, flush=True)
        elif place.is_local_main or outcome.message:  # the node's first rank may be the one that is lost
            with suppress(OSError):  # the launcher has ended
                outcome.write(self._handover)

    def _stop(self, why: str) -> None:
        saved = self.saved_step()
        if self.outcome.steps <= saved:
            self.outcome.status, self.outcome.message = "preempted", NOTHING_LOST
            return
        then = f"goes on from the checkpoint of step {saved}" if saved else "begins again, as no checkpoint was written"
        self.outcome.status = "interrupted"
        self.outcome.message = (
            f"{STOPPED_WORDS} in step {self.outcome.steps + 1}, and not saved {why or 'since it came again'}; the same "
            f"command with --resume auto {then}"
        )


def _tell(store: Store, message: str) -> None:
    with suppress(dist.DistError):
        leave_failure(store, message)
