"""A training run from its command line to its exit code, in the launcher and in each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from imagenet_fast.errors import UserError
from imagenet_fast.job import Job, check_writable, plan_job
from imagenet_fast.launch import LAUNCHED, end_on_signals, launch, local_ranks, under_torchrun
from imagenet_fast.loading import find_recipe, load_recipe
from imagenet_fast.record.outcome import Outcome, read_outcome


def train_here_or_launch(
    name: str,
    arguments: Sequence[str],
    *,
    data: Path | None,
    overrides: Sequence[str],
    sync: str | None,
    nproc: int | None,
    nodes: int,
    endpoint: str | None,
    out: Path | None,
    seed: int | None,
    scale: bool,
    trace: bool,
) -> int:
    """Under torchrun be one rank; otherwise check the job and run ``imagenet-fast ARGUMENTS`` on every rank."""
    path = find_recipe(name)
    recipe = load_recipe(path, sync, [*overrides, *([f"seed={seed}"] if seed is not None else [])])
    if under_torchrun():
        folder = (
            Path(os.environ[LAUNCHED]) if LAUNCHED in os.environ else out or new_folder(path.stem, recipe.sync.kind)
        )
        return _train_as_rank(plan_job(path.stem, recipe, data, folder, int(os.environ["WORLD_SIZE"]), scale, trace))
    if nodes > 1 and endpoint is None:
        raise UserError(f"--nodes {nodes} needs --rdzv-endpoint HOST:PORT, the same on every node")
    ranks = local_ranks(nproc)
    folder = (out or new_folder(path.stem, recipe.sync.kind)).absolute()
    job = plan_job(path.stem, recipe, data, folder, ranks * nodes, scale, trace)
    check_writable(folder)
    return _launch(job, arguments, ranks, nodes, endpoint)


def _launch(job: Job, arguments: Sequence[str], ranks: int, nodes: int, endpoint: str | None) -> int:
    os.environ[LAUNCHED] = str(job.folder)
    interrupted = False
    code, fate = 0, ""
    try:
        code, fate = launch(arguments, ranks, nodes, endpoint)
    except KeyboardInterrupt:
        interrupted = True
    if not job.folder.exists():  # rank 0 is on another node, or never came so far
        return 1 if interrupted else code
    outcome = read_outcome(job.folder) or _beginning(job)
    if interrupted and outcome.status == "failed":
        outcome.status = "interrupted"
        outcome.write(job.folder)
    elif code and not interrupted:
        outcome.status = "failed"
        outcome.message = outcome.message or fate
        outcome.write(job.folder)
        print(f"failed: {outcome.message}; what there is of the run lies in {job.folder}")
    return code if code == 2 else outcome.exit_code


def _train_as_rank(job: Job) -> int:
    from imagenet_fast.clock import Clock
    from imagenet_fast.data.dataset import open_dataset
    from imagenet_fast.record.opening import open_record
    from imagenet_fast.train import train
    from imagenet_fast.world import join, report_failure, reported_failure

    if os.environ["RANK"] == "0":
        check_writable(job.folder)
    end_on_signals()
    outcome = _beginning(job)
    with join() as world:
        clock = Clock()
        dataset = open_dataset(
            job.recipe.data, job.data, job.batching, world.rank, world.local_size, world.device, job.recipe.seed
        )
        record = open_record(job, world, clock)
        try:
            train(job, dataset, world, clock, record, outcome)
        except KeyboardInterrupt:
            outcome.message = reported_failure()  # another rank's, after which torchrun has stopped this one
            outcome.status = "failed" if outcome.message else "interrupted"
        except Exception as error:
            outcome.message = report_failure(error)
            raise
        finally:
            outcome.run_s = clock.run_s()
            if world.leads:
                outcome.write(job.folder)
            record("end", outcome.steps, **vars(outcome))
            record.close()
    ended_well = outcome.status in ("reached", "finished")
    return 0 if LAUNCHED in os.environ and ended_well else outcome.exit_code


def _beginning(job: Job) -> Outcome:
    return Outcome(
        "failed",
        job.name,
        job.recipe.sync.kind,
        job.batching.ranks,
        job.batching.global_batch,
        job.recipe.target_top1,
    )


def new_folder(recipe: str, sync: str) -> Path:
    """Where a run goes that was given no directory."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{sync}"
