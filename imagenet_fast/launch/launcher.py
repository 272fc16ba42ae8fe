"""Launch a training run or an evaluation on ranks of this node and others, and report how it ended."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from imagenet_fast.errors import UserError
from imagenet_fast.launch.exit_status import OPENED, TOLD
from imagenet_fast.launch.job_setup import check_writable
from imagenet_fast.launch.rendezvous import LaunchConfig
from imagenet_fast.launch.run_lock import hold
from imagenet_fast.launch.signals import interrupt_on_signals
from imagenet_fast.launch.torchrun import run_ranks
from imagenet_fast.metrics.run_result import NOTHING_LOST, STOPPED, STOPPED_WORDS, RunResult, read_outcome
from imagenet_fast.recipe.job import Evaluation, Job

_KILLED = (
    f"{STOPPED_WORDS}, and its ranks were killed before they had saved; the same command with --resume auto goes on "
    "from the last checkpoint"
)


def launch(job: Job, nodes: LaunchConfig) -> int:
    """Train ``job`` on this node's ranks and those of the other ``nodes``; return the command's exit code.

    The job file is in a temporary directory of this launcher, not in the run directory. Which node is the first, and so
    owns the run directory, is known only when all have met. Nodes that share the directory would overwrite each other's
    files.

    Raises:
        UserError: If the run directory cannot be written, or the nodes cannot meet.
    """
    check_writable(job.folder, job.resume)
    interrupt_on_signals()  # until torchrun has started ranks and handles signals itself
    interrupted = False
    code, fate = 0, ""
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as handover:
        here = Path(handover)
        try:
            code, fate = run_ranks(job, here, nodes, job.recipe.checkpoint.grace_s)
        except KeyboardInterrupt:
            interrupted = True
        left = read_outcome(here)
        has_run, told = (here / OPENED).exists(), (here / TOLD).exists()  # set by rank 0, if it is on this node
    if left is None and not has_run:
        if interrupted:
            print(NOTHING_LOST)
            return STOPPED
        if fate and code != 2:  # 2: already printed
            print(f"failed: {fate}")
        return 1 if code < 0 else code
    outcome = left or RunResult.beginning(job)
    if interrupted and outcome.status == "failed":
        outcome.status = "interrupted"
        outcome.message = outcome.message or _KILLED
    elif code and not interrupted and (outcome.status != "preempted" or outcome.message == NOTHING_LOST):
        outcome.status = "failed"  # a rank that reports no loss was stopped since another one failed
        outcome.message = fate if outcome.message == NOTHING_LOST else outcome.message or fate
        if code != 2:  # 2: the rank's error is already printed
            print(
                f"failed: {outcome.message}" + (f"; what there is of the run lies in {job.folder}" if has_run else "")
            )
    if outcome.status in ("preempted", "interrupted") and not told:
        print(outcome.message)
    if has_run and not (job.elastic and interrupted):  # after this node left, others may have resumed
        with suppress(OSError, UserError):  # rank 0 may have written it; a new run has started; the disk is full
            hold(job.folder, patience_s=0.0)
            outcome.write(job.folder)
    return code if code == 2 else outcome.exit_code


def launch_evaluation(evaluation: Evaluation, nodes: LaunchConfig) -> int:
    """Evaluate on this node's ranks and those of the other ``nodes``; return the command's exit code.

    Rank 0 prints the result.

    Raises:
        UserError: If the nodes cannot meet.
    """
    interrupt_on_signals()
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as handover:
        try:
            code, fate = run_ranks(evaluation, Path(handover), nodes)
        except KeyboardInterrupt:
            return 1
    if code and code != 2:  # 2: the rank's error is already printed
        print(f"failed: {fate}")
    return code if code in (0, 2) else 1
