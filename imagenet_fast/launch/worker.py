"""One rank of a training run, from its job to its outcome.

Our launcher starts it through ``__main__.py``, which reads the job. Under the user's own torchrun or srun, `cli/`
builds the job from the rank's command line.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from imagenet_fast.distributed.init import init_distributed
from imagenet_fast.distributed.ranks import RankInfo, set_group_rank
from imagenet_fast.launch.signals import end_on_signals
from imagenet_fast.metrics.exit_status import Ending
from imagenet_fast.metrics.run_folder import check_writable
from imagenet_fast.metrics.run_result import RunResult
from imagenet_fast.recipe.job import Job
from imagenet_fast.training.trainer import Trainer


def run_worker(
    job: Job, place: RankInfo, join_timeout_s: float, handover: Path | None = None, traces: Path | None = None
) -> RunResult:
    """Join the other ranks, train or resume, and return the result.

    Rank 0 writes the outcome to the run directory. The first rank of each node writes it to ``handover`` too.

    Args:
        job: What to train.
        place: This process's rank.
        join_timeout_s: Seconds to wait for the other ranks.
        handover: The launcher's directory; None without our launcher.
        traces: Directory for NCCL's records, where all ranks were told the same one.

    Raises:
        UserError: If the ranks do not meet, were given different jobs, or cannot start from the given weights or
            checkpoint.
    """
    job = _restarted(job)
    if place.is_main:
        check_writable(job.folder, job.resume)
    if place.is_local_main and handover is not None:
        (handover / "outcome.json").unlink(missing_ok=True)  # of the previous attempt, if torchrun restarted the ranks
    set_group_rank(place)
    ending = Ending(job, place, handover)
    signals = end_on_signals(job.recipe.checkpoint.grace_s, ending.late)

    def end(reason: str) -> None:
        """Write the outcome from another thread, as the training thread may be stuck."""
        ending.fail(reason)
        ending.leave()

    join_timeout, binding = timedelta(seconds=join_timeout_s), job.recipe.numa_binding
    try:
        with init_distributed(
            place, job.agreed(), join_timeout, job.recipe.timeout, end, traces, handover, binding
        ) as world:
            Trainer(job, world, ending=ending, ask_first=signals.ask_first).run()
    except KeyboardInterrupt:
        if not ending.ended:  # during the start
            ending.stop()
            ending.leave()
    return ending.outcome


def _restarted(job: Job) -> Job:
    """Return ``job``, set to resume if torchrun has restarted the ranks after a loss."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return replace(job, resume=True) if again else job
