"""The measuring commands: `imagenet-fast bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from imagenet_fast.cli.app import App
from imagenet_fast.cli.options import JsonOption, PngOption, in_a_directory, refuse_beside
from imagenet_fast.errors import UserError, listed, names

bench_app = App(help="Measure what this node can do.", no_args_is_help=True)

ModelOption = Annotated[Literal["alexnet", "alexnet_bn", "resnet18", "resnet50"], typer.Option(help="Model.")]
ImageSizeOption = Annotated[int, typer.Option(min=16, help="Side of the images in pixels.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
PrecisionOption = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(help="Precision. Default: bf16, or fp32 on a CPU without instructions for bf16."),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Number of rounds; each measures everything once.")]


@bench_app.command("step")
def bench_step(
    context: typer.Context,
    model: ModelOption = "resnet18",
    image_size: ImageSizeOption = 64,
    batch: BatchOption = 128,
    precision: PrecisionOption = None,
    sync: Annotated[str, typer.Option(metavar="A,B", help="Engines to time beside the plain loop.")] = "lazy",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile both loops with torch.compile, block by block.")
    ] = False,
    rounds: RoundsOption = 60,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each loop in a round.")] = 2,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Also time each engine with a checkpoint every so many steps. A round has as many steps.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time our training step beside a plain PyTorch loop, in alternating rounds.

    It uses one rank and synthetic data. With two GPUs or more it also times the
    plain loop in nn.DataParallel over all of them, with --batch images on each.
    With --checkpoint-every it also measures what checkpoints cost; they are
    written to the directory for temporary files (TMPDIR).
    """
    from imagenet_fast.bench.rows import show
    from imagenet_fast.bench.train_step import bench_step as measure
    from imagenet_fast.bench.train_step import no_data_parallel, own_precision, step_recipe

    if checkpoint_every is not None:
        refuse_beside(context, ("steps",), "has no effect beside --checkpoint-every; leave one of them out")
    dtype = precision or own_precision()
    variants = [
        step_recipe(model, image_size, batch, dtype, compiled, engine) for engine in listed("--sync", sync, str)
    ]
    show(measure(variants[0], variants, rounds, steps, checkpoint_every), json_file)
    if (reason := no_data_parallel(variants[0])) is not None:
        print(reason)


@bench_app.command("sync")
def bench_sync(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|FILE|random:SEED",
            help="Layer profile to replay: alexnet, resnet50, a .json file of `bench profile`, or a random network.",
        ),
    ] = "alexnet",
    hosts: Annotated[
        int,
        typer.Option(min=1, help="Number of hosts. With --rate each has its own link; otherwise all are this node."),
    ] = 4,
    ranks_per_host: Annotated[
        int, typer.Option(min=1, help="Ranks on each host, connected by its loopback interface.")
    ] = 1,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Rate of each host's link, such as 250mbit (Linux, root). Default: loopback, no limit."
        ),
    ] = None,
    scale: Annotated[int, typer.Option(min=1, help="Shrink each gradient to 1/N of its size.")] = 1,
    compute: Annotated[
        float | None, typer.Option(min=0, help="Compute time of a replayed step in seconds. Default: the profile's.")
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Engines to measure. NAME:WIRE sets the wire dtype of one. Default: all but powersgd; with --count: "
            "lazy, dear, ring, hybrid and sparse.",
        ),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(help="Wire dtype: fp32, bf16 or fp16. For int8 or fp8 name engines, as lazy:int8."),
    ] = "bf16",
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="ENGINE.KEY=VALUE", help="Change a key of an engine. Can be repeated.")
    ] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; each measures everything once.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each engine in a round.")] = 2,
    json_file: JsonOption = None,
    png: PngOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a timeline of each engine to this directory, for ui.perfetto.dev."),
    ] = None,
    count: Annotated[
        bool,
        typer.Option("--count", help="Count the messages of a step instead of sending them, for any number of ranks."),
    ] = False,
    ranks: Annotated[str, typer.Option(metavar="N,M", help="With --count: total numbers of ranks.")] = "8,64,512",
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="With --count: ranks on each node. They share one link.")
    ] = 8,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="With --count: rate of each node's link, by which engines plan.")
    ] = "56gbit",
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Measure what each technique of GradientFlow gains, added one by one.")
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,M",
            help="Compare DDP and hybrid at these batch sizes, such as 16,32,64,128. --compute is for the largest.",
        ),
    ] = None,
) -> None:
    """Time a training step under each engine, beside DDP and the least time possible.

    The step is replayed from a layer profile: ranks sleep instead of computing,
    and send real gradients. All ranks run on this node, over its loopback
    interface or, with --rate, over a simulated network with links of that rate.
    With --count nothing is sent; messages and bytes are only counted.
    """
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.recipe.load import parse_engines

    profile = load_profile(model)
    if compute is not None:
        profile = profile.scaled_to(compute)
    if count:
        from imagenet_fast.bench.comm_volume import COUNTED, bench_count
        from imagenet_fast.bench.rows import show

        measuring = (
            "hosts", "ranks_per_host", "rate", "scale", "rounds", "steps", "png", "trace", "ladder", "batches"
        )  # fmt: skip
        refuse_beside(context, measuring, "measures a network, and --count does without one; leave one of them out")
        engines = parse_engines(sync or COUNTED, wire, overrides)
        show(bench_count(profile, engines, ranks, ranks_per_node, link), json_file)
        return
    from imagenet_fast.bench.engines import ENGINES
    from imagenet_fast.bench.engines import bench_sync as measure_all
    from imagenet_fast.bench.figures import draw_batches, draw_ladder, draw_sync
    from imagenet_fast.bench.presets import bench_batches, bench_ladder
    from imagenet_fast.bench.tables import batch_table, ladder_table, sync_table
    from imagenet_fast.units import whole_numbers

    refuse_beside(context, ("ranks", "ranks_per_node", "link"), "is for --count; add that, or give --hosts and --rate")
    measure = partial(
        measure_all, hosts=hosts, ranks_per_host=ranks_per_host, rate=rate, scale=scale, rounds=rounds, steps=steps
    )
    if ladder or batches is not None:
        asked, own = ("--ladder", ("batches",)) if ladder else ("--batches", ())
        reason = f"does not go with {asked}, which has engines of its own; leave one of them out"
        refuse_beside(context, ("sync", "wire", "overrides", "trace", *own), reason)
    if ladder:
        _show_and_draw(partial(bench_ladder, profile, measure), ladder_table, draw_ladder, (9, 4), json_file, png)
    elif batches is not None:
        by_batch = partial(bench_batches, profile, whole_numbers("--batches", batches, "16,32,64,128"), measure)
        _show_and_draw(by_batch, batch_table, draw_batches, (7, 4), json_file, png)
    else:
        engines = parse_engines(sync or ENGINES, wire, overrides)
        by_engine = partial(measure, profile, engines, traces=trace)
        _show_and_draw(by_engine, sync_table, draw_sync, (9, 0.4 * len(engines) + 2), json_file, png)


@bench_app.command("collectives")
def bench_collectives(
    sizes: Annotated[
        str,
        typer.Option(
            metavar="A,B..C:N",
            help="Message sizes in bytes; K, M and G are powers of 1024. B..C is a range that doubles, or grows by N.",
        ),
    ] = "2KB..64MB",
    collectives: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Collectives to time: native (the backend's own), ring, ..., mpi. Default: all that can run here.",
        ),
    ] = None,
    hosts: Annotated[
        int,
        typer.Option(min=1, help="Number of hosts. With --rate each has its own link; otherwise all are this node."),
    ] = 4,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Rate of each host's link, such as 250mbit (Linux, root). Default: loopback, no limit."
        ),
    ] = None,
    wire: Annotated[str, typer.Option(help="Wire dtype: fp32, bf16 or fp16. MPI always sends fp32.")] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu (gloo) or cuda (NCCL). Default: cuda if there is a GPU for each rank.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; each measures everything once.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time for each all-reduce in a round; it is repeated 200 times at most.")
    ] = 0.4,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Time all-reduces by message size: gloo, NCCL, MPI and our own."""
    from imagenet_fast.bench.collectives import bench_collectives as measure
    from imagenet_fast.bench.figures import draw_bandwidth
    from imagenet_fast.bench.tables import bandwidth_table

    times = partial(measure, sizes, collectives, hosts, ranks_per_host, rate, wire, device, rounds, seconds)
    _show_and_draw(times, bandwidth_table, draw_bandwidth, (11, 5), json_file, png)


@bench_app.command("pipeline")
def bench_pipeline(
    stages: Annotated[int, typer.Option(min=2, help="Number of stages; each is a rank on this node.")] = 4,
    micro_batches: Annotated[
        str, typer.Option(metavar="N,M", help="Numbers of micro-batches to divide a batch into.")
    ] = "1,2,4,8,16",
    schedules: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Schedules: gpipe, 1f1b (needs as many micro-batches as stages) and interleaved."
        ),
    ] = "gpipe,1f1b,interleaved",
    model: ModelOption = "resnet50",
    image_size: ImageSizeOption = 64,
    batch: BatchOption = 32,
    precision: PrecisionOption = None,
    sleep: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds that a stage sleeps for a micro-batch's forward. Default: from the layer profile."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu (gloo) or cuda (NCCL). Default: cuda if there is a GPU for each rank.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps to measure of each schedule.")] = 3,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure pipeline schedules: bubble, memory and speed.

    The bubble is the share of time in which ranks wait for each other; the
    formula's value is beside it. Memory is what each rank keeps for backward.
    """
    from imagenet_fast.bench.figures import draw_pipeline
    from imagenet_fast.bench.pipeline import bench_pipeline as measure
    from imagenet_fast.bench.rows import table
    from imagenet_fast.bench.train_step import own_precision, step_recipe
    from imagenet_fast.units import whole_numbers

    recipe = step_recipe(model, image_size, batch, precision or own_precision(), compiled=False)
    counts = whole_numbers("--micro-batches", micro_batches, "1,2,4,8,16")
    chosen = listed("--schedules", schedules, str)
    times = partial(measure, recipe, stages, counts, chosen, sleep, device, rounds)
    inches = (9, 1 + len(chosen) * (0.6 + 0.3 * stages))
    _show_and_draw(times, table, draw_pipeline, inches, json_file, png)


@bench_app.command("profile")
def bench_profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", callback=in_a_directory, help="The JSON file to write.")],
    model: ModelOption = "alexnet",
    image_size: ImageSizeOption = 224,
    batch: BatchOption = 64,
    precision: PrecisionOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 10,
) -> None:
    """Record the compute time of each layer on this hardware, for `bench sync`."""
    from imagenet_fast.bench.layer_profiler import record_profile
    from imagenet_fast.bench.train_step import own_precision, step_recipe
    from imagenet_fast.cost_model.layer_profile import save_profile
    from imagenet_fast.distributed.init import prepare_device

    if file.suffix != ".json":
        raise UserError(f"{file} does not end in .json, by which `bench sync` knows a profile; name it so")
    recipe = step_recipe(model, image_size, batch, precision or own_precision(), compiled=False)
    profile = record_profile(recipe, prepare_device(0)[0], steps)
    save_profile(profile, file)
    print(f"{len(profile.layers)} layers, {profile.compute_s:.3f} s a step: {file}")


@bench_app.command("data")
def bench_data(
    loaders: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Loaders to time: folder, pixels (folder on decoded images), dali, dali-bare, torchvision-pil, "
            "torchvision-io, decoding, synthetic.",
        ),
    ] = "folder,pixels,dali,dali-bare,torchvision-pil,torchvision-io,decoding",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of the images: train/<class>/*. Default: photos that are made here."
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            min=16, help="Without --data: shrink the photos to this shorter side first, as data prepare --resize does."
        ),
    ] = None,
    image_size: ImageSizeOption = 224,
    batch: BatchOption = 128,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of threads or processes. Default: one per core.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each loader in a round.")] = 5,
    rounds: RoundsOption = 5,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Time the loaders without training: ours, torchvision's, DALI's own, and decoding alone."""
    from imagenet_fast.bench.dataloaders import Loader, bench_loading
    from imagenet_fast.bench.figures import draw_loading
    from imagenet_fast.bench.rows import table
    from imagenet_fast.distributed.cores import usable_cores

    chosen: list[Loader] = names("--loaders", loaders, get_args(Loader))
    threads = workers or usable_cores()
    measure = partial(bench_loading, chosen, data, image_size, batch, threads, seconds, rounds, resize)
    _show_and_draw(measure, table, draw_loading, (8, 1 + 0.5 * len(chosen)), json_file, png)


@bench_app.command("kernels", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench_kernels() -> None:
    """Say what counts the kernels of an optimizer's step now."""
    raise UserError("bench kernels is a test now; on a GPU, run `pytest tests/gpu -k kernels` in the source directory")


def _show_and_draw(
    measure: Callable[[], list[Any]],
    table: Callable[[list[Any]], Any],
    draw: Callable[[list[Any], Any], None],
    inches: tuple[float, float],
    json_file: Path | None,
    png: Path | None,
) -> None:
    """Print what ``measure`` returns, and draw it to ``png`` if given; refuse an impossible plot before measuring."""
    from imagenet_fast.bench.plots import new_figure

    figure = new_figure(png, *inches) if png is not None else None
    rows = measure()
    _show(rows, table, json_file)
    if figure is not None:
        draw(rows, figure)
        figure.savefig(png)


def _show(rows: list[Any], table: Callable[[list[Any]], Any], json_file: Path | None) -> None:
    """Print dataclass rows as a table, and write them as JSON if a file is given."""
    from rich.console import Console

    from imagenet_fast.metrics.tables import write_json

    Console().print(table(rows))
    if json_file is not None:
        write_json([asdict(row) for row in rows], json_file)
