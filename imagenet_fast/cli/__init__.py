"""The command line: parse options, run a command, set the exit code.

torch and pydantic are imported only by the commands that need them.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast import __version__
from imagenet_fast.cli.bench import bench_app
from imagenet_fast.cli.data import data_app
from imagenet_fast.cli.launch import launch_app
from imagenet_fast.cli.options import (
    WEIGHTS,
    DataOption,
    ElasticNodesOption,
    EndpointOption,
    JsonOption,
    NodesOption,
    NprocOption,
    OnBadImageOption,
    OptionalRecipeOption,
    PatienceOption,
    PngOption,
    RecipeOption,
    SetOption,
    SyncOption,
    WeightsOption,
    WeightsRecipeOption,
    in_a_directory,
    written_out,
)
from imagenet_fast.errors import JobAborted, UserError, exit_with_error, warn
from imagenet_fast.launch.signals import stopping_early

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="The shipped recipes.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.add_typer(launch_app, name="launch")

# Defaults of `compare`. Layouts use an engine that is exact and overlaps as much as it can.
_ENGINES = "ddp,ring,lazy,hybrid,sparse"
_ENGINE_OF_LAYOUTS = "hybrid"


def _print_version(asked: bool) -> None:
    """Print the version and exit, if asked to."""
    if asked:
        print(f"imagenet-fast {__version__}")
        raise typer.Exit


def entry() -> None:
    """Run the command line as the installed console script."""
    from imagenet_fast.launch.fast_exit import leave
    from imagenet_fast.launch.stdio import keep_printing, refuse_if_lost

    keep_printing()
    try:
        main()
    except SystemExit as end:
        if not end.code and sys.argv[1:2] != ["train"]:  # the result of `train` is its run directory, not its output
            refuse_if_lost()
        leave(end)


def main() -> None:
    """Run the command line.

    A UserError is printed as one sentence on stderr, with exit code 2.

    Raises:
        SystemExit: Always, with the exit code.
    """
    # Set before torch is imported: for hosts that have no name, or do not answer yet, its C++ code prints pages of
    # stack frames. A launcher reports such errors itself; a rank keeps real errors of its backend.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if "RANK" in os.environ else "FATAL")
    try:
        app()
    except UserError as error:
        exit_with_error(str(error))
    except JobAborted as fault:
        exit_with_error(str(fault), code=1)
    except (OSError, UnicodeDecodeError) as error:
        if "RANK" in os.environ:  # on a rank the traceback is needed
            raise
        exit_with_error(f"{error}; check the path")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train ImageNet fast, with a swappable gradient-sync engine."""


@app.command()
@stopping_early()
def train(
    recipe: OptionalRecipeOption = None,
    data: DataOption = None,
    overrides: SetOption = [],  # noqa: B006  (typer's way to say: an empty list)
    sync: SyncOption = None,
    nproc: NprocOption = None,
    nodes: ElasticNodesOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: PatienceOption = 300,
    init_from: Annotated[
        Path | None,
        typer.Option(metavar=WEIGHTS, help="Start from these weights, as in eval, instead of fresh ones."),
    ] = None,
    fresh_head: Annotated[
        bool, typer.Option("--fresh-head", help="With --init-from: start the last layer anew, as for other classes.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|RUN",
            help="Go on from that run's last checkpoint; auto: with the run in --out, or begin it.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="So often all ranks start again, and go on, where one was lost. Default: 0; 10 where nodes may leave.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory. Default: runs/<time>-<recipe>-<sync>.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    on_bad_image: OnBadImageOption = None,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch", help="Shrink the batch to the ranks there are, and scale the learning rate."),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json, a timeline of steps 11 to 15 for ui.perfetto.dev.")
    ] = False,
    silent: Annotated[
        bool, typer.Option("--no-warnings", hidden=True, help="Whoever starts us has said already what is doubtful.")
    ] = False,
) -> None:
    """Train a recipe to its target accuracy.

    Ctrl-C, SIGTERM or SIGUSR1, sent to this command or to any rank, saves the
    state and ends the run, within checkpoint.grace_s seconds. A second signal
    ends it at once. The same command with --resume auto resumes the run. With
    --nodes MIN:MAX only the node that gets the signal ends; the others
    continue.

    Exit codes:

    - 0: target reached, or no target set
    - 1: error or interrupted
    - 2: wrong usage
    - 3: trained to the end without reaching the target
    - 4: stopped by a signal without loss
    """
    from imagenet_fast.distributed.rank_info import rank_info_from_env
    from imagenet_fast.launch.job_setup import plan_job, recipe_to_train, run_to_resume
    from imagenet_fast.launch.slurm import adopt_step
    from imagenet_fast.recipe.validation import lint

    run = run_to_resume(resume, out) if resume is not None else None
    overrides = [*overrides, *written_out({"seed": seed, "data.on_bad_image": on_bad_image})]
    name, written, data = recipe_to_train(recipe, run, sync, overrides, data)
    plan = partial(
        plan_job, name, written, data=data, folder=run or out, scale=scale_batch, trace=trace, init_from=init_from,
        fresh_head=fresh_head, resume=run is not None,
    )  # fmt: skip
    adopt_step(os.environ)
    place = rank_info_from_env()
    if not silent and (place is None or place.is_main):
        for doubt in lint(written):
            warn(doubt)
    if place is not None:  # started by the user's torchrun or srun: this process is a rank
        from imagenet_fast.launch.worker import run_worker

        job = plan(place.size)
        raise typer.Exit(run_worker(job, place, join_timeout).exit_code)

    from imagenet_fast.launch.launcher import launch
    from imagenet_fast.launch.rendezvous import resolve_nodes

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout, max_restarts)
    raise typer.Exit(launch(plan(cluster.ranks, nodes=cluster.counts), cluster))


@app.command("eval")
def evaluate(
    weights: WeightsOption,
    data: DataOption = None,
    recipe: WeightsRecipeOption = None,
    overrides: SetOption = [],  # noqa: B006
    on_bad_image: OnBadImageOption = None,
    nproc: NprocOption = None,
    nodes: NodesOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: PatienceOption = 300,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", callback=in_a_directory, help="Write the result there too."),
    ] = None,
) -> None:
    """Classify each validation image once with given weights, and print top-1 and top-5 accuracy.

    A run directory provides its recipe, and its images if they have not been
    moved.
    """
    from imagenet_fast.distributed.rank_info import rank_info_from_env
    from imagenet_fast.launch.job_setup import plan_evaluation
    from imagenet_fast.launch.slurm import adopt_step

    overrides = [*overrides, *written_out({"data.on_bad_image": on_bad_image})]
    plan = partial(plan_evaluation, weights, recipe, overrides, data=data, report=json_file)
    adopt_step(os.environ)
    place = rank_info_from_env()
    if place is not None:  # started by the user's torchrun or srun: this process is a rank
        from imagenet_fast.launch.evaluate import evaluate_as_rank

        evaluate_as_rank(plan(place.size), place, join_timeout)
        return

    from imagenet_fast.launch.launcher import launch_evaluation
    from imagenet_fast.launch.rendezvous import resolve_nodes

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    raise typer.Exit(launch_evaluation(plan(cluster.ranks), cluster))


@app.command()
def export(
    weights: WeightsOption,
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=in_a_directory, help="Ends as its format; must not exist yet.")
    ],
    recipe: WeightsRecipeOption = None,
    kind: Annotated[
        str, typer.Option("--format", metavar="safetensors|pt2", help="Weights; or a program of torch.export.")
    ] = "safetensors",
) -> None:
    """Write weights to a file for use in other programs.

    `safetensors` holds them under torchvision's names. `pt2` is the whole
    network for evaluation, in fp32 and for any number of images;
    torch.export.load runs it without this program. Both include the classes and
    how to prepare images, as far as that is known.
    """
    from imagenet_fast.launch.export import export_weights

    print(f"written to {export_weights(weights, recipe, kind, out)}")


@app.command()
def doctor(
    data: DataOption = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs would lie.")] = Path("runs"),
    nproc: NprocOption = None,
    nodes: NodesOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: PatienceOption = 300,
    json_file: JsonOption = None,
) -> None:
    """Check for anything that would prevent training here, and say how to fix it.

    Prints one line per check: ok, warn or fail. The exit code is 1 if any check
    fails. With --nodes, run the command on each node: it checks all of them and
    the network between them, and the first node prints the result.
    """
    from dataclasses import asdict

    from rich.console import Console

    from imagenet_fast.doctor.report import findings_table
    from imagenet_fast.launch.doctor import DoctorJob, launch_doctor
    from imagenet_fast.launch.rendezvous import resolve_nodes
    from imagenet_fast.metrics.json_io import to_json
    from imagenet_fast.recipe.schema import Timeout

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    found = launch_doctor(DoctorJob(data, out, Timeout()), cluster)
    if found is None:
        return
    Console().print(findings_table(found))
    if json_file is not None:
        json_file.write_text(to_json([asdict(finding) for finding in found], indent=2) + "\n", encoding="utf-8")
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(1)


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        from imagenet_fast.metrics.tables import recipe_table

        Console().print(recipe_table())


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME|PATH")]) -> None:
    """Print one recipe."""
    from imagenet_fast.launch.stdio import print_file
    from imagenet_fast.recipe.load import find_recipe

    print_file(find_recipe(name).read_bytes())


@app.command()
def compare(
    recipe: RecipeOption,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help=f"Engines, one run each. Default: {_ENGINES}; with --layout: {_ENGINE_OF_LAYOUTS}."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="A run for each of these layouts, too, as dp4,tp4,pp2dp2: N replicas, N shards (parallel.tensor) and "
            "N stages (parallel.pipeline), which multiply to the ranks. A pipeline that is given no "
            "parallel.micro_batches has 4, or the fewest above that are no fewer than its stages and divide the batch. "
            "Default: the recipe's.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1,2", help="A run for each of these, too. Default: the recipe's seed.")
    ] = None,
    data: DataOption = None,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="As in train; ENGINE.KEY=VALUE for that engine alone."),
    ] = [],  # noqa: B006
    hosts: Annotated[int | None, typer.Option(min=1, help="Ranks. Default: one a GPU, else 2.")] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Give each rank a host and a link of its own, as 250mbit.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of all runs. Default: runs/<time>-<recipe>-compare.")
    ] = None,
) -> None:
    """Train a recipe once per engine or layout, with the same seed, and compare time and steps to accuracy.

    In the table s/step is the median over all steps but the first ten; each
    step counts with its log interval's mean. MB/step is what a rank sends per
    step for gradients and activations, counted by the program. With --rate,
    link MB is what a rank puts on its host's link during training, counted by
    the kernel. Both are means over the same steps and all ranks.

    The curves are drawn to compare.png, and `tensorboard --logdir DIR` shows
    every run. If a run fails, the others continue, and the exit code is 1.
    """
    from rich.console import Console

    from imagenet_fast.bench.compare import compare as train_all
    from imagenet_fast.bench.compare import contestants
    from imagenet_fast.bench.parallel_layouts import parse_layouts
    from imagenet_fast.bench.whole_numbers import whole_numbers
    from imagenet_fast.launch.job_setup import new_folder
    from imagenet_fast.launch.rendezvous import local_ranks
    from imagenet_fast.metrics.report import draw_curves, report_table

    folder = out or new_folder(Path(recipe).stem, "compare")
    seeded = [] if seeds is None else whole_numbers("--seeds", seeds, "1,2,3", zero=True)
    ranks = local_ranks(hosts)
    layouts = [] if layout is None else parse_layouts(layout, ranks)
    usual = _ENGINE_OF_LAYOUTS if layouts else _ENGINES
    engines = (usual if sync is None else sync).split(",")
    runs = contestants(recipe, ranks, engines, seeded, overrides, layouts)
    ended = train_all(recipe, runs, data=data, ranks=ranks, rate=rate, folder=folder)
    past = [run.past for run in ended]
    failed = [run for run in ended if run.failed]
    print()
    Console().print(report_table(past))
    if layouts and len(engines) == 1:
        print(f"every layout with the engine {engines[0]}")
    for run in failed:
        left = f"what there is of it lies in {run.past.folder}" if run.past.folder.exists() else "it left nothing"
        print(f"{run.past.label} ended with exit code {run.exit_code}; {left}")
    print(f"in TensorBoard: tensorboard --logdir {shlex.quote(str(folder))}")
    png = folder / "compare.png"
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(past, png)
    print(f"drawn to {png}")
    if failed or len(ended) < len(runs):  # fewer runs ended: the command was interrupted
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    png: PngOption = None,
) -> None:
    """Compare past runs: print a table with time to accuracy, and draw their curves with --png."""
    from rich.console import Console

    from imagenet_fast.metrics.report import draw_curves, read_run, report_table

    once: dict[Path, Path] = {}
    for folder in runs:
        once.setdefault(folder.resolve(), folder)
    past = [read_run(folder) for folder in once.values()]
    Console().print(report_table(past))
    if png is not None:
        draw_curves(past, png)
        print(f"drawn to {png}")
