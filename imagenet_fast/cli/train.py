"""The commands that run ranks on a recipe or on weights: `imagenet-fast train` and `eval`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.launch.signals import stopping_early

if TYPE_CHECKING:
    from imagenet_fast.distributed.ranks import RankInfo


@stopping_early()
def train(
    recipe: opt.Recipe[str | None] = None,
    data: opt.Directory[Path | None] = None,
    keys: opt.Keys = opt.NO_KEYS,
    sync: opt.Sync = None,
    nproc: opt.Count[int | None] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|MIN:MAX")] = None,
    rdzv_endpoint: opt.Endpoint = None,
    join_timeout: opt.JoinTimeout = 300,
    init_from: opt.Weights[Path | None] = None,
    fresh_head: bool = False,
    resume: Annotated[str | None, typer.Option(metavar="auto|RUN")] = None,
    max_restarts: Annotated[int | None, typer.Option(metavar="N", min=0)] = None,
    out: opt.RunDirectory = None,
    seed: int | None = None,
    on_bad_image: opt.OnBadImage = None,
    scale_batch: bool = False,
    trace: bool = False,
) -> None:
    """Train a recipe to its target accuracy.

    Ctrl-C, SIGTERM or SIGUSR1, sent to this command or to any rank, saves the
    state and ends the run, within checkpoint.grace_s seconds. A second signal
    ends it at once. The same command with --resume RUN resumes the run. With
    --nodes MIN:MAX only the node that gets the signal ends; the others
    continue.

    Exit codes:

    - 0: target reached, or no target set
    - 1: error or interrupted
    - 2: wrong usage
    - 3: trained to the end without reaching the target
    - 4: stopped by a signal without loss

    Args:
        recipe: Name of a shipped recipe, or a TOML file. Default: that of --resume RUN.
        nodes: Number of nodes; run the same command on each. With a range, nodes may leave and join. Default: 1, or
            all nodes of srun.
        init_from: Start from these weights instead of random ones; the same values as --weights of eval.
        fresh_head: With --init-from: start with a new last layer, for other classes.
        resume: Resume this run from its newest checkpoint. auto: resume the run in --out, or start it.
        max_restarts: How often to restart all ranks after one was lost. Default: 0, or 10 with --nodes MIN:MAX.
        out: Run directory. Default: a new one in runs.
        seed: Random seed to use instead of the recipe's.
        scale_batch: Scale the global batch and the learning rate with the number of ranks.
        trace: Write trace.json, a timeline of steps 11 to 15 for ui.perfetto.dev.
    """
    from imagenet_fast.launch.job_setup import plan_job, recipe_of, run_to_resume
    from imagenet_fast.run.run_dir import RunDir

    run = run_to_resume(resume, out) if resume is not None else None
    given = {"seed": seed, "data.on_bad_image": on_bad_image}
    keys = [*keys, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    if recipe is None and (run is None or not RunDir(run).job.is_file()):
        raise UserError("which recipe? add --recipe NAME, one of `imagenet-fast recipes`, or the path of a TOML file")
    place = _started_rank(
        {"--nproc": nproc, "--nodes": nodes, "--rdzv-endpoint": rdzv_endpoint, "--max-restarts": max_restarts}
    )
    doubts: list[str] = []
    name, written, begun = recipe_of(run or Path(), recipe, keys, sync, doubts.append)
    images = begun.data if data is None and begun is not None else data
    plan = partial(
        plan_job, name, written, data=images, folder=run or out, scale=scale_batch, trace=trace, init_from=init_from,
        fresh_head=fresh_head, resume=run is not None, overrides=keys,
    )  # fmt: skip
    if place is None or place.is_main:
        for doubt in (*doubts, *written.doubts()):
            warn(doubt)
    if place is not None:
        from imagenet_fast.launch.rank import train_as_rank

        known = (run or out) is not None
        if not known and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise UserError(
                "torchrun's --max-restarts would begin a new run each time; add --out DIR, where the run goes on"
            )
        job = plan(place.size)
        raise typer.Exit(train_as_rank(job, place, join_timeout, traces=job.folder if known else None))

    from imagenet_fast.launch.launcher import launch
    from imagenet_fast.launch.nodes import resolve_nodes

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout, max_restarts)
    raise typer.Exit(launch(plan(cluster.ranks, nodes=cluster.counts), cluster))


def evaluate(
    weights: opt.Weights[Path],
    data: opt.Directory[Path | None] = None,
    recipe: opt.Recipe[str | None] = None,
    keys: opt.Keys = opt.NO_KEYS,
    on_bad_image: opt.OnBadImage = None,
    nproc: opt.Count[int | None] = None,
    nodes: opt.Count[int | None] = None,
    rdzv_endpoint: opt.Endpoint = None,
    join_timeout: opt.JoinTimeout = 300,
    json_file: opt.Json = None,
) -> None:
    """Classify each validation image once with given weights, and print top-1 and top-5 accuracy.

    A run directory provides its recipe, and its images if they have not been
    moved.

    Args:
        recipe: Recipe that the weights were trained by. Default: the run's.
    """
    from imagenet_fast.launch.job_setup import plan_evaluation

    keys = keys if on_bad_image is None else [*keys, f"data.on_bad_image={on_bad_image}"]
    plan = partial(plan_evaluation, weights, recipe, keys, data=data, report=json_file)
    if (place := _started_rank({"--nproc": nproc, "--nodes": nodes, "--rdzv-endpoint": rdzv_endpoint})) is not None:
        from imagenet_fast.launch.rank import evaluate_as_rank

        evaluate_as_rank(plan(place.size), place, join_timeout)
        return

    from imagenet_fast.launch.launcher import run_ranks
    from imagenet_fast.launch.nodes import resolve_nodes
    from imagenet_fast.run.launcher_dir import LauncherDir

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    with LauncherDir.temporary() as launcher_dir:
        try:
            code, cause = run_ranks(plan(cluster.ranks), launcher_dir, cluster)
        except KeyboardInterrupt:
            raise typer.Exit(1) from None
    if code:
        raise UserError(cause) if code == 2 else JobAborted(cause)


def _started_rank(options: Mapping[str, object]) -> RankInfo | None:
    """Return this process's rank if the user's torchrun or srun has started it; ``options`` are then of no use."""
    from imagenet_fast.distributed.ranks import rank_info_from_env, srun_to_torchrun_env

    srun_to_torchrun_env(os.environ, chosen=options["--nproc"] is not None or options["--nodes"] is not None)
    place = rank_info_from_env()
    given = [option for option, value in options.items() if value is not None]
    if given and place is not None and place.is_main:
        warn(f"{' and '.join(given)} would start ranks, and torchrun or srun has started these; it is not used")
    return place
