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
from imagenet_fast.metrics.exit_status import OPENED, Ending
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.run_result import RunResult
from imagenet_fast.metrics.tables import write_json
from imagenet_fast.recipe.job import DoctorJob, Evaluation, Job
from imagenet_fast.recipe.schema import Timeout
from imagenet_fast.training.evaluation import evaluate_weights
from imagenet_fast.training.trainer import Trainer


def train_as_rank(
    job: Job, rank: RankInfo, join_timeout_s: float, launcher_dir: Path | None = None, traces: Path | None = None
) -> RunResult:
    """Join the other ranks, train or resume, and return the result.

    Rank 0 writes the outcome to the run directory. The first rank of each node writes it to ``launcher_dir`` too.

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
    if rank.is_local_main and launcher_dir is not None:
        for left in (RunDir(launcher_dir).outcome, launcher_dir / OPENED):  # of the attempt before
            left.unlink(missing_ok=True)
    ending = Ending(job, rank, launcher_dir)
    signals = Signals(job.recipe.checkpoint.grace_s, ending.late)

    def end(reason: str) -> None:
        """Write the outcome from another thread, as the training thread may be stuck."""
        ending.fail(reason)
        ending.leave()

    recipe = job.recipe
    try:
        with init_distributed(
            rank, job.agreed(), join_timeout_s, recipe.timeout, end, traces, launcher_dir, recipe.numa_binding
        ) as world:
            Trainer(job, world, ending=ending, ask_first=signals.ask_first).run()
    except KeyboardInterrupt:
        if not ending.ended:  # during the start
            ending.stop()
            ending.leave()
    return ending.outcome


def evaluate_as_rank(
    evaluation: Evaluation, rank: RankInfo, join_timeout_s: float, launcher_dir: Path | None = None
) -> None:
    """Join the other ranks and evaluate; rank 0 prints the result, and writes it to ``evaluation.report`` if given.

    The other arguments are those of ``train_as_rank``.

    Raises:
        UserError: If the ranks cannot meet or were given different jobs, or the weights or images do not fit.
    """
    recipe = evaluation.recipe
    Signals()  # nothing is saved, so a signal ends the rank at once
    with init_distributed(
        rank, evaluation.agreed(), join_timeout_s, recipe.timeout, left=launcher_dir, numa_binding=recipe.numa_binding
    ) as world:
        result = evaluate_weights(evaluation, world)
        if world.is_main:
            Console().print(result.table())
            write_json(result, evaluation.report)


def examine_as_rank(job: DoctorJob, rank: RankInfo, join_timeout_s: float, launcher_dir: Path) -> None:
    """Join the other ranks and run the checks; rank 0 writes the results of all ranks to ``launcher_dir``.

    The other arguments are those of ``train_as_rank``.

    Raises:
        UserError: If the ranks cannot meet.
    """
    from imagenet_fast.doctor.cluster_checks import examine_all  # ranks that train do not need it

    Signals()
    with init_distributed(rank, {}, join_timeout_s, Timeout(), left=launcher_dir) as world:
        examine_all(job, world, launcher_dir)
