"""A training run, or an evaluation, on this node and others: handed to ranks of our own, and how they ended."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from imagenet_fast.launch.nodes import Nodes
from imagenet_fast.launch.planning import check_writable
from imagenet_fast.launch.signals import interrupt_on_signals
from imagenet_fast.launch.torchrun import run_ranks
from imagenet_fast.recipe.evaluating import Evaluation
from imagenet_fast.recipe.job import Job
from imagenet_fast.record.outcome import Outcome, read_outcome


def launch(job: Job, nodes: Nodes) -> int:
    """Train ``job`` on this node's ranks, and on those of the other ``nodes``; the command's exit code.

    The job lies in a folder of this launcher's own, not in the run directory: which node is the first, and so has
    that directory, shows only when all have met, and nodes that share it would write over each other's.

    Raises UserError where the run cannot be written or the nodes cannot meet.
    """
    check_writable(job.folder, job.resume)
    before = _version_of(job.folder / "job.json")
    interrupt_on_signals()  # until torchrun, which answers them itself, has started ranks
    interrupted = False
    code, fate = 0, ""
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as handover:
        job.write(Path(handover) / "job.json")
        try:
            code, fate = run_ranks("train", Path(handover) / "job.json", nodes)
        except KeyboardInterrupt:
            interrupted = True
        left = read_outcome(Path(handover))
    has_run = _version_of(job.folder / "job.json") not in (None, before)  # rank 0 is here, and came so far
    outcome = left or (read_outcome(job.folder) if has_run else None)
    if outcome is None and not has_run:
        if fate and code != 2:  # 2: the rank has said itself what is wrong
            print(f"failed: {fate}")
        return 1 if interrupted or code < 0 else code
    outcome = outcome or Outcome.beginning(job)
    if interrupted and outcome.status == "failed":
        outcome.status = "interrupted"
    elif code and not interrupted and outcome.status != "preempted":
        outcome.status = "failed"
        outcome.message = outcome.message or fate
        print(f"failed: {outcome.message}" + (f"; what there is of the run lies in {job.folder}" if has_run else ""))
    if has_run and not (job.elastic and interrupted):  # from where this node has left others may have gone on
        with suppress(OSError):  # rank 0 may have left it; why the disk takes nothing has been said
            outcome.write(job.folder)
    return code if code == 2 else outcome.exit_code


def _version_of(path: Path) -> tuple[int, int] | None:
    """Which differs from that of any file that was there before; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def launch_evaluation(evaluation: Evaluation, nodes: Nodes) -> int:
    """Evaluate on this node's ranks, and on those of the other ``nodes``; the command's exit code.

    Rank 0 says what came of it. Raises UserError where the nodes cannot meet.
    """
    interrupt_on_signals()
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as handover:
        path = Path(handover) / "evaluation.json"
        evaluation.write(path)
        try:
            code, fate = run_ranks("eval", path, nodes)
        except KeyboardInterrupt:
            return 1
    if code and code != 2:  # 2: the rank has said itself what is wrong
        print(f"failed: {fate}")
    return code if code in (0, 2) else 1
