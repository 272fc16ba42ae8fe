"""What a rank does: join the others, then train, evaluate or check its node.

Under our launcher ``__main__.py`` reads the job. Under the user's own torchrun or srun, `cli/` builds it from the
rank's command line.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from imagenet_fast.distributed.init import init_distributed
from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.launch.signals import Signals
from imagenet_fast.metrics.tables import write_json
from imagenet_fast.recipe.job import DoctorJob, Evaluation, Job
from imagenet_fast.recipe.schema import Timeout
from imagenet_fast.run.ending import Ending
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.training.evaluation import evaluate_weights
from imagenet_fast.training.trainer import Trainer


def train_as_rank(
    job: Job, rank: RankInfo, join_timeout_s: float, launcher_dir: LauncherDir | None = None, traces: Path | None = None
) -> int:
    """Join the other ranks, train or resume, and return the exit code of this rank.

    Rank 0 writes the outcome to the run directory.

    Args:
        job: What to train.
        rank: This process's rank.
        join_timeout_s: Seconds to wait for the other ranks.
        launcher_dir: The launcher's directory; None without our launcher.
        traces: Directory for NCCL's records, where all ranks were told the same one.

    Raises:
        UserError: If the ranks do not meet, were given different jobs, or cannot start from the given weights or
            checkpoint.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:  # torchrun has restarted the ranks after a loss
        job = replace(job, resume=True)
    ending = Ending(job, rank, launcher_dir)
    signals = Signals(job.recipe.checkpoint.grace_s, ending.late)
    if launcher_dir is not None:
        launcher_dir.leave()  # not before: a signal that came first has killed this rank, which loses nothing
    recipe, left = job.recipe, launcher_dir.heartbeat if launcher_dir is not None else None
    try:
        with init_distributed(
            rank, job.agreed(), join_timeout_s, recipe.timeout, ending.leave_for, traces, left, recipe.numa_binding
        ) as world:
            Trainer(job, world, ending=ending, ask_first=signals.ask_first).run()
    except KeyboardInterrupt:
        if not ending.ended:  # during the start
            ending.stop()
            ending.write()
    return ending.exit_code


def evaluate_as_rank(
    evaluation: Evaluation, rank: RankInfo, join_timeout_s: float, launcher_dir: LauncherDir | None = None
) -> None:
    """Join the other ranks and evaluate; rank 0 prints the result, and writes it to ``evaluation.report`` if given.

    The other arguments are those of ``train_as_rank``.

    Raises:
        UserError: If the ranks cannot meet or were given different jobs, or the weights or images do not fit.
    """
    recipe, left = evaluation.recipe, launcher_dir.heartbeat if launcher_dir is not None else None
    Signals()  # nothing is saved, so a signal ends the rank at once
    with init_distributed(
        rank, evaluation.agreed(), join_timeout_s, recipe.timeout, left=left, numa_binding=recipe.numa_binding
    ) as world:
        result = evaluate_weights(evaluation, world)
        if world.is_main:
            Console().print(result.table())
            write_json(result, evaluation.report)


def examine_as_rank(job: DoctorJob, rank: RankInfo, join_timeout_s: float, launcher_dir: LauncherDir) -> None:
    """Join the other ranks and run the checks; rank 0 leaves the results of all ranks in ``launcher_dir``.

    The other arguments are those of ``train_as_rank``.

    Raises:
        UserError: If the ranks cannot meet.
    """
    from imagenet_fast.doctor.cluster_checks import examine_all  # ranks that train do not need it

    Signals()
    with init_distributed(rank, {}, join_timeout_s, Timeout(), left=launcher_dir.heartbeat) as world:
        examine_all(job, world, launcher_dir.results)
