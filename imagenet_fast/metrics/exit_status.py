"""Record how this rank's part of a run ends, and report it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from imagenet_fast.atomic_io import check_place
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.distributed.watchdog import first_reason
from imagenet_fast.metrics.run_result import NOT_BEGUN, NOTHING_LOST, STOPPED_WORDS, RunResult
from imagenet_fast.recipe.job import Job

OPENED = "opened"
"""File in a launcher's directory: rank 0 has started to write the run directory."""


@dataclass
class Ending:
    """The end of this rank's run: its outcome, at first that of a run that has not started, and where it is written.

    After ``begin_record`` rank 0 writes it to the run directory. The first rank of each node, and any rank with a
    message, writes it to ``handover``.
    """

    job: Job
    place: RankInfo
    handover: Path | None
    """The launcher's directory; None without our launcher."""
    saved_step: Callable[[], int] = lambda: 0
    """Function that returns the step from which the run would resume now."""
    ended: bool = False
    _begun: bool = False
    _opened: os.stat_result | None = None

    def __post_init__(self) -> None:
        """Begin with the outcome of a run that has not started."""
        self.outcome = RunResult.of(self.job.name, self.job.recipe, self.job.batching)

    def begin_record(self) -> None:
        """Record that the run directory belongs to this run, and that rank 0 writes there from now on."""
        self._begun = True
        if self.place.is_main:
            self._opened = self.job.folder.stat()
            if self.handover is not None:
                (self.handover / OPENED).touch()

    def stopped(self, saved: bool) -> None:
        """Set the outcome of a run whose ranks have all stopped after a step, ``saved`` or not."""
        then = "not saved, as not every node sees the run; give an --out that all of them share"
        self.outcome.status = "interrupted"
        if saved:
            self.outcome.status, then = "preempted", f"saved; {self.job.resuming} goes on"
        self.outcome.message = f"{STOPPED_WORDS} after step {self.outcome.steps}, and {then}"

    def stop(self, why: str = "") -> None:
        """End this rank after a signal, before all ranks have saved together.

        Report it to the other ranks, which may not have received the signal.
        """
        self._stop(why)
        first = first_reason(self.outcome.message)
        if not first.startswith(STOPPED_WORDS):  # torchrun stopped this rank after another failed
            self.fail(first)

    def late(self) -> int:
        """Write the outcome when the time after a signal is up; return the exit code.

        This runs in a thread of its own, as the training thread may be stuck.
        """
        if not self.ended:
            self._stop(f"within checkpoint.grace_s, {self.job.recipe.checkpoint.grace_s:g} s")
            self.leave()
        return self.outcome.exit_code

    def fail(self, reason: str) -> None:
        """Set the outcome for ``reason``, a failure or a stop of this rank or of another."""
        self.outcome.message = reason
        self.outcome.status = "failed"
        if reason.startswith(STOPPED_WORDS):
            self.outcome.status = "preempted" if reason.startswith(NOTHING_LOST) else "interrupted"

    def leave(self) -> None:
        """Write the outcome, and print it if neither the end of the record nor a launcher does."""
        is_told = self.ended or self.handover is not None
        self.write()
        if self.place.is_main and not is_told and self.outcome.status in ("preempted", "interrupted"):
            print(self.outcome.message, flush=True)

    def write(self) -> None:
        """Write the outcome."""
        self.ended = True
        if self._opened is not None:
            with suppress(OSError):  # a full disk is reported already, and ``handover`` is another place
                check_place(self.job.folder, self._opened)
                self.outcome.write(self.job.folder)
        if self.handover is not None and (self.place.is_local_main or self.outcome.message):
            with suppress(OSError):  # the launcher has ended
                self.outcome.write(self.handover)

    def _stop(self, why: str) -> None:
        steps, saved, resuming = self.outcome.steps, self.saved_step(), self.job.resuming
        then = f"goes on from the checkpoint of step {saved}" if saved else "begins again, as no checkpoint was written"
        lost = f"{STOPPED_WORDS} in step {steps + 1}, and not saved {why or 'since it came again'}; {resuming} {then}"
        kept = f"{NOTHING_LOST}; {resuming} goes on" if self._begun or saved else NOT_BEGUN
        self.fail(lost if steps > saved else kept)
