"""The measuring commands: `imagenet-fast bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from imagenet_fast.cli.app import App
from imagenet_fast.cli.options import JsonOption, PngOption, in_a_directory, show
from imagenet_fast.errors import UserError, listed, names

if TYPE_CHECKING:
    from imagenet_fast.cost_model.layer_profile import Profile

bench_app = App(help="Measure what this node can do.", no_args_is_help=True)

published_app = App(help="Measure here what papers compare.", no_args_is_help=True)
bench_app.add_typer(published_app, name="published")

ProfileOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|FILE|random:SEED",
        help="Layer profile: alexnet, resnet50, a .json file of `bench profile`, or a random network.",
    ),
]
LabNodesOption = Annotated[
    int,
    typer.Option("--nodes", min=1, help="Number of nodes. With --rate each has its own link; else all are this node."),
]
LabNprocOption = Annotated[
    int, typer.Option("--nproc", min=1, help="Ranks on each node, connected by its loopback interface.")
]
RateOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Rate of each node's link, such as 250mbit (Linux, root). Default: loopback, no limit."
    ),
]
ScaleOption = Annotated[int, typer.Option(min=1, help="Shrink each gradient to 1/N of its size.")]
ComputeOption = Annotated[
    float | None, typer.Option(min=0, help="Compute time of a replayed step in seconds. Default: the profile's.")
]
WireOption = Annotated[
    Literal["fp32", "bf16", "fp16"],
    typer.Option(help="Wire dtype. For int8 or fp8 name engines, as lazy:int8."),
]
EngineKeysOption = Annotated[
    list[str], typer.Option("--set", metavar="ENGINE.KEY=VALUE", help="Change a key of an engine. Can be repeated.")
]
SizesOption = Annotated[
    str,
    typer.Option(
        metavar="A,B..C:N",
        help="Message sizes in bytes; K, M and G are powers of 1024. B..C is a range that doubles, or grows by N.",
    ),
]
DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="cpu (gloo) or cuda (NCCL). Default: cuda if there is a GPU for each rank."),
]
StepsOption = Annotated[int, typer.Option(min=1, help="Timed steps of each engine in a round.")]
SecondsOption = Annotated[
    float, typer.Option(min=0, help="Time for each all-reduce in a round; it is repeated 200 times at most.")
]
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
    json_file: JsonOption = None,
) -> None:
    """Time our training step beside a plain PyTorch loop, in alternating rounds.

    It uses one rank and synthetic data.
    """
    from imagenet_fast.bench.train_step import bench_step as measure
    from imagenet_fast.bench.train_step import own_precision, step_recipe

    dtype = precision or own_precision()
    variants = [
        step_recipe(model, image_size, batch, dtype, compiled, engine) for engine in listed("--sync", sync, str)
    ]
    _show(partial(measure, variants[0], variants, rounds, steps), json_file)


@bench_app.command("sync")
def bench_sync(
    model: ProfileOption = "alexnet",
    nodes: LabNodesOption = 4,
    nproc: LabNprocOption = 1,
    rate: RateOption = None,
    scale: ScaleOption = 1,
    compute: ComputeOption = None,
    sync: Annotated[
        str, typer.Option(metavar="A,B", help="Engines to measure. NAME:WIRE sets the wire dtype of one.")
    ] = "ddp:fp32,ddp,allreduce,ring,lazy,hybrid,dear,sparse,auto",
    wire: WireOption = "bf16",
    overrides: EngineKeysOption = [],  # noqa: B006
    rounds: RoundsOption = 5,
    steps: StepsOption = 2,
    json_file: JsonOption = None,
    png: PngOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a timeline of each engine to this directory, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Time a training step under each engine, beside DDP and the least time possible.

    The step is replayed from a layer profile: ranks sleep instead of computing,
    and send real gradients. All ranks run on this node, over its loopback
    interface or, with --rate, over a simulated network with links of that rate.
    """
    from imagenet_fast.bench.engines import bench_sync as measure
    from imagenet_fast.bench.plots import draw_steps
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.recipe.load import parse_engines

    engines = parse_engines(sync, wire, overrides)
    lab = Lab(nodes, nproc, rate)
    times = partial(measure, _profile(model, compute), engines, lab, scale, rounds, steps, trace)
    _show(times, json_file, draw_steps, (9, 0.4 * len(engines) + 2), png)


@bench_app.command("count")
def bench_count(
    model: ProfileOption = "alexnet",
    ranks: Annotated[str, typer.Option(metavar="N,M", help="Total numbers of ranks.")] = "8,64,512",
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on each node. They share one link.")] = 8,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of each node's link, by which engines plan.")
    ] = "56gbit",
    compute: ComputeOption = None,
    sync: Annotated[
        str, typer.Option(metavar="A,B", help="Engines to count. NAME:WIRE sets the wire dtype of one.")
    ] = "lazy,dear,ring,hybrid,sparse",
    wire: WireOption = "bf16",
    overrides: EngineKeysOption = [],  # noqa: B006
    json_file: JsonOption = None,
) -> None:
    """Count the messages, bytes and launches of a step under each engine, for any number of ranks.

    Nothing is sent, and nothing waits for the times of the layer profile.
    """
    from imagenet_fast.bench.comm_volume import bench_count as count
    from imagenet_fast.recipe.load import parse_engines

    engines = parse_engines(sync, wire, overrides)
    _show(partial(count, _profile(model, compute), engines, ranks, nproc, link), json_file)


@bench_app.command("collectives")
def bench_collectives(
    sizes: SizesOption = "2KB..64MB",
    collectives: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Collectives to time: native (the backend's own), ring, ... Default: all that can run here.",
        ),
    ] = None,
    nodes: LabNodesOption = 4,
    nproc: LabNprocOption = 1,
    rate: RateOption = None,
    wire: WireOption = "fp32",
    device: DeviceOption = None,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 0.4,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Time all-reduces by message size: the backend's own, and our collectives."""
    from imagenet_fast.bench.collectives import bench_collectives as measure
    from imagenet_fast.bench.collectives import parse_collectives, parse_sizes
    from imagenet_fast.bench.plots import draw_bandwidth
    from imagenet_fast.netlab.ranks import Lab

    chosen = parse_sizes(sizes), parse_collectives(collectives)
    times = partial(measure, Lab(nodes, nproc, rate), *chosen, wire, device, rounds, seconds)
    _show(times, json_file, draw_bandwidth, (11, 5), png)


@published_app.command("ladder")
def bench_ladder(
    model: ProfileOption = "alexnet",
    nodes: LabNodesOption = 4,
    nproc: LabNprocOption = 1,
    rate: RateOption = None,
    scale: ScaleOption = 1,
    compute: ComputeOption = None,
    rounds: RoundsOption = 5,
    steps: StepsOption = 2,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure what each technique of GradientFlow gains, added one by one, and each of ours."""
    from imagenet_fast.bench.engines import bench_sync as measure
    from imagenet_fast.bench.plots import draw_steps
    from imagenet_fast.bench.published import bench_ladder
    from imagenet_fast.netlab.ranks import Lab

    on = partial(measure, lab=Lab(nodes, nproc, rate), scale=scale, rounds=rounds, steps=steps)
    _show(partial(bench_ladder, _profile(model, compute), on), json_file, draw_steps, (9, 4), png)


@published_app.command("batches")
def bench_batches(
    batches: Annotated[
        str,
        typer.Option(metavar="N,M", help="Batch sizes of a rank. --compute is for the largest."),
    ] = "16,32,64,128",
    model: ProfileOption = "alexnet",
    nodes: LabNodesOption = 4,
    nproc: LabNprocOption = 1,
    rate: RateOption = None,
    scale: ScaleOption = 1,
    compute: ComputeOption = None,
    rounds: RoundsOption = 5,
    steps: StepsOption = 2,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Compare DDP and hybrid at several batch sizes, as the thesis of the hybrid all-reduce does."""
    from imagenet_fast.bench.engines import bench_sync as measure
    from imagenet_fast.bench.plots import draw_steps
    from imagenet_fast.bench.published import bench_batches
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.units import whole_numbers

    on = partial(measure, lab=Lab(nodes, nproc, rate), scale=scale, rounds=rounds, steps=steps)
    counts = whole_numbers("--batches", batches, "16,32,64,128")
    rows = partial(bench_batches, _profile(model, compute), counts, on)
    _show(rows, json_file, draw_steps, (9, 0.8 * len(counts) + 2), png)


@published_app.command("backends")
def bench_backends(
    sizes: SizesOption = "2KB..64MB",
    nodes: LabNodesOption = 4,
    nproc: LabNprocOption = 1,
    rate: RateOption = None,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 0.4,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Time the all-reduces of gloo, NCCL (with a GPU for each rank) and MPI (if it is installed)."""
    from imagenet_fast.bench.collectives import parse_sizes
    from imagenet_fast.bench.plots import draw_bandwidth
    from imagenet_fast.bench.published import bench_backends as measure
    from imagenet_fast.netlab.ranks import Lab

    times = partial(measure, Lab(nodes, nproc, rate), parse_sizes(sizes), rounds, seconds)
    _show(times, json_file, draw_bandwidth, (11, 5), png)


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
        float, typer.Option(min=0, help="Seconds that a stage sleeps for a micro-batch's forward.")
    ] = 0.01,
    device: DeviceOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps to measure of each schedule.")] = 3,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure pipeline schedules: bubble, speed and, on GPUs, memory.

    The bubble is the share of time in which ranks wait for each other; the
    formula's value is beside it. Memory is the most that a step allocates.
    """
    from imagenet_fast.bench.pipeline import bench_pipeline as measure
    from imagenet_fast.bench.plots import draw_pipeline
    from imagenet_fast.bench.train_step import own_precision, step_recipe
    from imagenet_fast.units import whole_numbers

    recipe = step_recipe(model, image_size, batch, precision or own_precision(), compiled=False)
    counts = whole_numbers("--micro-batches", micro_batches, "1,2,4,8,16")
    chosen = listed("--schedules", schedules, str)
    times = partial(measure, recipe, stages, counts, chosen, sleep, device, rounds)
    inches = (9, 1 + len(chosen) * (0.6 + 0.3 * stages))
    _show(times, json_file, draw_pipeline, inches, png)


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
    from imagenet_fast.bench.plots import draw_loading
    from imagenet_fast.distributed.cores import usable_cores

    chosen: list[Loader] = names("--loaders", loaders, get_args(Loader))
    threads = workers or usable_cores()
    measure = partial(bench_loading, chosen, data, image_size, batch, threads, seconds, rounds, resize)
    _show(measure, json_file, draw_loading, (8, 1 + 0.5 * len(chosen)), png)


@bench_app.command("kernels", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench_kernels() -> None:
    """Say what counts the kernels of an optimizer's step now."""
    raise UserError("bench kernels is a test now; on a GPU, run `pytest tests/gpu -k kernels` in the source directory")


def _profile(model: str, compute_s: float | None) -> Profile:
    """Return a layer profile, scaled to a compute time if there is one."""
    from imagenet_fast.cost_model.layer_profile import load_profile

    profile = load_profile(model)
    return profile if compute_s is None else profile.scaled_to(compute_s)


def _show(
    measure: Callable[[], Sequence[Any]],
    json_file: Path | None,
    draw: Callable[[Any, Any], None] | None = None,
    inches: tuple[float, float] = (0, 0),
    png: Path | None = None,
) -> None:
    """Show the rows that ``measure`` returns, and draw them to ``png``; refuse an impossible plot before measuring."""
    from imagenet_fast.metrics.figures import new_figure
    from imagenet_fast.metrics.tables import table

    figure = new_figure(png, *inches) if png is not None else None
    rows = measure()
    show(table(rows), [asdict(row) for row in rows], json_file)
    if draw is not None and figure is not None:
        draw(rows, figure)
        figure.savefig(png)
