"""The commands that run ranks on a recipe or on weights: `imagenet-fast train` and `eval`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from imagenet_fast.cli.options import (
    NO_KEYS,
    WEIGHTS,
    DataOption,
    ElasticNodesOption,
    EndpointOption,
    JoinTimeoutOption,
    JsonOption,
    KeysArgument,
    NodesOption,
    NprocOption,
    OnBadImageOption,
    OptionalRecipeOption,
    SetOption,
    SyncOption,
    WeightsOption,
    WeightsRecipeOption,
    run_directory,
    written_out,
)
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.launch.signals import stopping_early

if TYPE_CHECKING:
    from imagenet_fast.distributed.ranks import RankInfo


@stopping_early()
def train(
    recipe: OptionalRecipeOption = None,
    data: DataOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    sync: SyncOption = None,
    nproc: NprocOption = None,
    nodes: ElasticNodesOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: JoinTimeoutOption = 300,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar=WEIGHTS,
            help="Start from these weights instead of random ones; the same values as --weights of eval.",
        ),
    ] = None,
    fresh_head: Annotated[
        bool, typer.Option("--fresh-head", help="With --init-from: start with a new last layer, for other classes.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|RUN",
            help="Resume this run from its newest checkpoint. auto: resume the run in --out, or start it.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="How often to restart all ranks after one was lost. Default: 0, or 10 with --nodes MIN:MAX.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=run_directory, help="Run directory. Default: a new one in runs."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed to use instead of the recipe's.")] = None,
    on_bad_image: OnBadImageOption = None,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch", help="Scale the global batch and the learning rate with the number of ranks."),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json, a timeline of steps 11 to 15 for ui.perfetto.dev.")
    ] = False,
    silent: Annotated[
        bool, typer.Option("--no-warnings", hidden=True, help="Do not warn; the caller has done so.")
    ] = False,
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
    """
    from imagenet_fast.distributed.ranks import rank_info_from_env, srun_to_torchrun_env
    from imagenet_fast.launch.job_setup import plan_job, recipe_of, run_to_resume
    from imagenet_fast.metrics.run_dir import RunDir
    from imagenet_fast.recipe.validation import lint

    run = run_to_resume(resume, out) if resume is not None else None
    overrides = [*overrides, *keys, *written_out({"seed": seed, "data.on_bad_image": on_bad_image})]
    if recipe is None and (run is None or not RunDir(run).job.is_file()):
        raise UserError("which recipe? add --recipe NAME, one of `imagenet-fast recipes`, or the path of a TOML file")
    srun_to_torchrun_env(os.environ, chosen=nproc is not None or nodes is not None)
    place = rank_info_from_env()
    doubts: list[str] = []
    name, written, begun = recipe_of(run or Path(), recipe, overrides, sync, doubts.append)
    images = begun.data if data is None and begun is not None else data
    plan = partial(
        plan_job, name, written, data=images, folder=run or out, scale=scale_batch, trace=trace, init_from=init_from,
        fresh_head=fresh_head, resume=run is not None, overrides=overrides,
    )  # fmt: skip
    if not silent and (place is None or place.is_main):
        for doubt in (*doubts, *lint(written)):
            warn(doubt)
    if place is not None:  # started by the user's torchrun or srun: this process is a rank
        _warn_idle(
            place,
            {"--nproc": nproc, "--nodes": nodes, "--rdzv-endpoint": rdzv_endpoint, "--max-restarts": max_restarts},
        )
        from imagenet_fast.launch.rank import train_as_rank

        known = (run or out) is not None
        if not known and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise UserError(
                "torchrun's --max-restarts would begin a new run each time; add --out DIR, where the run goes on"
            )
        job = plan(place.size)
        raise typer.Exit(train_as_rank(job, place, join_timeout, traces=job.folder if known else None).exit_code)

    from imagenet_fast.launch.launcher import launch
    from imagenet_fast.launch.nodes import resolve_nodes

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout, max_restarts)
    raise typer.Exit(launch(plan(cluster.ranks, nodes=cluster.counts), cluster))


def evaluate(
    weights: WeightsOption,
    data: DataOption = None,
    recipe: WeightsRecipeOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    on_bad_image: OnBadImageOption = None,
    nproc: NprocOption = None,
    nodes: NodesOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: JoinTimeoutOption = 300,
    json_file: JsonOption = None,
) -> None:
    """Classify each validation image once with given weights, and print top-1 and top-5 accuracy.

    A run directory provides its recipe, and its images if they have not been
    moved.
    """
    from imagenet_fast.distributed.ranks import rank_info_from_env, srun_to_torchrun_env
    from imagenet_fast.launch.job_setup import plan_evaluation

    overrides = [*overrides, *keys, *written_out({"data.on_bad_image": on_bad_image})]
    plan = partial(plan_evaluation, weights, recipe, overrides, data=data, report=json_file)
    srun_to_torchrun_env(os.environ, chosen=nproc is not None or nodes is not None)
    place = rank_info_from_env()
    if place is not None:  # started by the user's torchrun or srun: this process is a rank
        _warn_idle(place, {"--nproc": nproc, "--nodes": nodes, "--rdzv-endpoint": rdzv_endpoint})
        from imagenet_fast.launch.rank import evaluate_as_rank

        evaluate_as_rank(plan(place.size), place, join_timeout)
        return

    from imagenet_fast.launch.launcher import run_ranks
    from imagenet_fast.launch.nodes import resolve_nodes

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    with TemporaryDirectory(prefix="imagenet-fast-") as folder:
        try:
            code, cause = run_ranks(plan(cluster.ranks), Path(folder), cluster)
        except KeyboardInterrupt:
            raise typer.Exit(1) from None
    if code:
        raise UserError(cause) if code == 2 else JobAborted(cause)


def _warn_idle(place: RankInfo, options: Mapping[str, object]) -> None:
    """Warn on rank 0 of options that say how to start ranks, where torchrun or srun has started them."""
    given = [option for option, value in options.items() if value is not None]
    if given and place.is_main:
        warn(f"{' and '.join(given)} would start ranks, and torchrun or srun has started these; it is not used")
