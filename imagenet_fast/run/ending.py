"""Record how this rank's part of a run ends, and report it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.distributed.watchdog import Reason, first_reason
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.run.result import NOT_BEGUN, STOPPED_WORDS, RunResult


@dataclass
class Ending:
    """The end of this rank's run: its outcome, at first that of a run that has not started, and where it is written.

    After ``begin_record`` rank 0 writes it to the run directory. Every rank leaves it in ``launcher_dir``.
    """

    job: Job
    place: RankInfo
    launcher_dir: LauncherDir | None
    """The launcher's directory; None without our launcher."""
    saved_step: Callable[[], int] = lambda: 0
    """Function that returns the step from which the run would resume now."""
    ended: bool = False
    begun: bool = False
    """Whether the run directory has a record of this run."""
    _together: bool = False
    _check_folder: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Begin with the outcome of a run that has not started."""
        self.outcome = RunResult.of(self.job.name, self.job.recipe, self.job.batching)

    @property
    def exit_code(self) -> int:
        """The exit code of this rank. Under our launcher, which knows the outcome, it is 0 unless work was lost.

        If nodes may leave, a stop concerns only those that got the signal; torchrun restarts the ranks of the others.
        """
        fine = ("finished",) if self.job.elastic else ("finished", "preempted")
        is_fine = self._together or self.outcome.status in fine
        return 0 if self.launcher_dir is not None and is_fine else self.outcome.exit_code

    def begin_record(self, check_folder: Callable[[], None]) -> None:
        """Record that the run directory belongs to this run, and that rank 0 writes there from now on.

        Rank 0 writes nothing there if ``check_folder`` raises OSError: the directory has another name by now.
        """
        self.begun, self._check_folder = True, check_folder
        if self.place.is_main and self.launcher_dir is not None:
            self.launcher_dir.opened.touch()

    def stopped(self, saved: bool) -> None:
        """Set the outcome of a run whose ranks have all stopped after a step, ``saved`` or not."""
        self._together = not self.job.elastic  # so torchrun starts none again
        not_saved = "not saved, as not every node sees the run; give an --out that all of them share"
        then = f"saved; {self.job.resuming} goes on" if saved else not_saved
        message = f"{STOPPED_WORDS} after step {self.outcome.steps}, and {then}"
        self.fail(Reason(message, "preempted" if saved else "interrupted"))

    def stop(self, why: str = "since it came again") -> None:
        """End this rank after a signal, before all ranks have saved together; ``why`` they have not.

        Report it to the other ranks, which may not have received the signal.
        """
        steps, saved = self.outcome.steps, self.saved_step()
        if steps > saved:
            lost = f"{STOPPED_WORDS} in step {steps + 1}, and not saved {why}; {self.job.going_on(saved)}"
            own = Reason(lost, "interrupted")
        elif self.begun or saved:
            own = Reason(f"{STOPPED_WORDS}, and nothing is lost; {self.job.resuming} goes on", "preempted")
        else:
            own = Reason(NOT_BEGUN, "preempted")
        if self.launcher_dir is not None and self.launcher_dir.lost_rank():  # so torchrun has stopped this one
            own = Reason(f"another rank on {platform.node()} was killed")
        first = first_reason(own)
        self.fail(first if first.status == "failed" else own)

    def late(self) -> int:
        """Write the outcome when the time after a signal is up; return the exit code.

        This and ``leave_for`` run in threads of their own, as the training thread may be stuck.
        """
        if not self.ended:
            self.stop(f"within checkpoint.grace_s, {self.job.recipe.checkpoint.grace_s:g} s")
            self.write()
        return self.exit_code

    def leave_for(self, reason: Reason) -> int:
        """Write the outcome for ``reason``; return the exit code."""
        self.fail(reason)
        self.write()
        return self.exit_code

    def fail(self, reason: Reason) -> None:
        """Set the outcome for ``reason``, a failure or a stop of this rank or of another."""
        self.outcome.message, self.outcome.status = reason

    def write(self, told: bool = False) -> None:
        """Write the outcome; if it is that of a stop, print it once a node, unless it is ``told`` otherwise."""
        told |= self.ended or not self.place.is_local_main
        self.ended, outcome = True, self.outcome
        if self.begun and self.place.is_main:
            with suppress(OSError):  # a full disk is reported already, and ``launcher_dir`` is another place
                self._check_folder()
                outcome.write(self.job.folder)
        if self.launcher_dir is not None:
            self.launcher_dir.leave(outcome.status, outcome.message, int(outcome.status == "failed"))
        if not told and outcome.status in ("preempted", "interrupted"):
            print(outcome.message, flush=True)
