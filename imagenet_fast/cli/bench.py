"""The measuring commands: `imagenet-fast bench`.

Options of several commands:
    nodes: Number of nodes. With --rate each has its own link; else all are this node.
    nproc: Ranks on each node, connected by its loopback interface.
    rate: Rate of each node's link, such as 250mbit (Linux, root). Default: loopback, no limit.
    scale: Shrink each gradient to 1/N of its size.
    compute: Compute time of a replayed step in seconds. Default: the profile's.
    wire: Wire dtype. For int8 name engines, as lazy:int8.
    keys: ENGINE.KEY=VALUE changes a key of an engine; --set ENGINE.KEY=VALUE is the same.
    sync: Engines. NAME:WIRE sets the wire dtype of one.
    sizes: Message sizes in bytes; K, M and G are powers of 1024. B..C is a range that doubles, or grows by N.
    device: cpu (gloo) or cuda (NCCL). Default: cuda if there is a GPU for each rank.
    steps: Timed steps of each engine in a round.
    seconds: Time for each all-reduce in a round; it is repeated 200 times at most.
    image_size: Side of the images in pixels.
    batch: Images in a batch.
    data: Directory of the images: train/<class>/* and val/<class>/*, or shards. Default: photos that are made here.
    workers: Number of threads or processes of a loader. Default: one per core.
    precision: Precision. Default: bf16, or fp32 on a CPU without instructions for bf16.
    rounds: Number of rounds; each measures everything once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.cli.app import App
from imagenet_fast.errors import UserError, listed, names
from imagenet_fast.units import whole_numbers

bench_app = App(help="Measure what this node can do.", no_args_is_help=True)

_PROFILE = "Layer profile: alexnet, resnet50, a .json file of `bench profile`, or a random network."
ProfileOption = Annotated[str, typer.Option(metavar="NAME|FILE|random:SEED", help=_PROFILE)]
Network = Literal["alexnet", "alexnet_bn", "resnet18", "resnet50"]
ModelOption = Annotated[Network, typer.Option(help="Model.")]
Pixels = Annotated[int, typer.Option(metavar="N", min=16)]
Dtype = Literal["fp32", "bf16", "fp16"]
Device = Literal["cpu", "cuda"]


@bench_app.command("step")
def bench_step(
    model: Annotated[Literal[Network, "cifarnet"], typer.Option(help="Model.")] = "resnet18",
    image_size: Pixels = 64,
    batch: opt.Count[int] = 128,
    precision: Dtype | None = None,
    sync: opt.Names[str] = "lazy",
    compile: bool = False,
    graph: bool = False,
    loader: Literal["threads", "pixels", "dali"] | None = None,
    data: opt.Directory[Path | None] = None,
    workers: opt.Count[int | None] = None,
    rounds: opt.Count[int] = 60,
    steps: opt.Count[int] = 2,
    json_file: opt.Json = None,
) -> None:
    """Time our training step beside a plain PyTorch loop, on one rank and synthetic data.

    Args:
        sync: Engines to time beside the plain loop.
        compile: Compile both loops with torch.compile, block by block.
        graph: Time each loop replayed from a CUDA graph as well.
        loader: Time our loops on this loader's images, too, and it alone; pixels: two decoded batches, by threads.
        steps: Steps of each loop in a round.
    """
    from imagenet_fast.bench.train_step import bench_step as measure
    from imagenet_fast.bench.train_step import step_recipe

    if data is not None and loader is None:
        raise UserError(f"--data {data} is not read without a loader; give --loader threads, or leave --data out")
    engines = listed("--sync", sync, str)
    variants = [step_recipe(model, image_size, batch, precision, compile, engine) for engine in engines]
    opt.show_rows(measure(variants, rounds, steps, graph, loader, data, workers), json_file)


@bench_app.command("sync")
def bench_sync(
    model: ProfileOption = "alexnet",
    nodes: opt.Count[int] = 4,
    nproc: opt.Count[int] = 1,
    rate: opt.Rate[str | None] = None,
    scale: opt.Count[int] = 1,
    compute: opt.Seconds[float | None] = None,
    sync: opt.Names[str] = "ddp:fp32,ddp,allreduce,ring,lazy,hybrid,dear,sparse,auto",
    wire: Dtype = "bf16",
    keys: opt.Keys = opt.NO_KEYS,
    rounds: opt.Count[int] = 5,
    steps: opt.Count[int] = 2,
    json_file: opt.Json = None,
    png: opt.Png = None,
    trace: opt.Directory[Path | None] = None,
) -> None:
    """Time a training step under each engine, beside DDP and the least time possible.

    The step is replayed from a layer profile: ranks sleep instead of computing,
    and send real gradients.

    Args:
        trace: Write a timeline of each engine to this directory, for ui.perfetto.dev.
    """
    from imagenet_fast.bench.engines import bench_sync as measure
    from imagenet_fast.bench.plots import draw_steps
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.recipe.load import parse_engines

    engines = parse_engines(sync, wire, keys)
    profile, lab = load_profile(model).scaled_to(compute), Lab(nodes, nproc, rate)
    opt.show_rows(measure(profile, engines, lab, scale, rounds, steps, trace), json_file, draw_steps, png)


@bench_app.command("count")
def bench_count(
    model: ProfileOption = "alexnet",
    ranks: opt.Numbers[str] = "8,64,512",
    nproc: opt.Count[int] = 8,
    link: opt.Rate[str] = "56gbit",
    compute: opt.Seconds[float | None] = None,
    sync: opt.Names[str] = "lazy,dear,ring,hybrid,sparse",
    wire: Dtype = "bf16",
    keys: opt.Keys = opt.NO_KEYS,
    json_file: opt.Json = None,
) -> None:
    """Count the messages, bytes and launches of a step under each engine, for any number of ranks.

    Nothing is sent, and nothing waits for the times of the layer profile.

    Args:
        ranks: Total numbers of ranks.
        nproc: Ranks on each node. They share one link.
        link: Rate of each node's link, by which engines plan.
    """
    from imagenet_fast.bench.comm_volume import bench_count as count
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.recipe.load import parse_engines

    engines, sizes = parse_engines(sync, wire, keys), whole_numbers("--ranks", ranks, "8,64,512")
    opt.show_rows(count(load_profile(model).scaled_to(compute), engines, sizes, nproc, link), json_file)


@bench_app.command("collectives")
def bench_collectives(
    sizes: Annotated[str, typer.Option(metavar="A,B..C:N")] = "2KB..64MB",
    collectives: opt.Names[str | None] = None,
    nodes: opt.Count[int] = 4,
    nproc: opt.Count[int] = 1,
    rate: opt.Rate[str | None] = None,
    wire: Dtype = "fp32",
    device: Device | None = None,
    rounds: opt.Count[int] = 3,
    seconds: opt.Seconds[float] = 0.4,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Time all-reduces by message size: the backend's own, and our collectives.

    Args:
        collectives: Collectives to time: native (the backend's own), ring, ... Default: all that can run here.
        wire: Wire dtype.
    """
    from imagenet_fast.bench.collectives import bench_collectives as measure
    from imagenet_fast.bench.collectives import parse_sizes
    from imagenet_fast.bench.plots import draw_bandwidth
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.recipe.sync_table import Collective

    chosen = None if collectives is None else names("--collectives", collectives, get_args(Collective))
    times = measure(Lab(nodes, nproc, rate), parse_sizes(sizes), chosen, wire, device, rounds, seconds)
    opt.show_rows(times, json_file, draw_bandwidth, png)


@bench_app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def published() -> None:
    """Say where the tables of papers are."""
    raise UserError("`bench published` is now `python -m experiments.published`, in a checkout; write that")


@bench_app.command("pipeline")
def bench_pipeline(
    stages: Annotated[int, typer.Option(metavar="N", min=2)] = 4,
    micro_batches: opt.Numbers[str] = "1,2,4,8,16",
    schedules: opt.Names[str] = "gpipe,1f1b,interleaved",
    model: ModelOption = "resnet50",
    image_size: Pixels = 64,
    batch: opt.Count[int] = 32,
    precision: Dtype | None = None,
    sleep: opt.Seconds[float] = 0.01,
    device: Device | None = None,
    rounds: opt.Count[int] = 3,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Measure pipeline schedules: bubble, speed and, on GPUs, memory.

    The bubble is the share of time in which ranks wait for each other.

    Args:
        stages: Number of stages; each is a rank on this node.
        micro_batches: Numbers of micro-batches to divide a batch into.
        schedules: Schedules: gpipe, 1f1b (needs as many micro-batches as stages) and interleaved.
        sleep: Seconds that a stage sleeps for a micro-batch's forward.
        rounds: Steps to measure of each schedule.
    """
    from imagenet_fast.bench.pipeline import bench_pipeline as measure
    from imagenet_fast.bench.plots import draw_pipeline
    from imagenet_fast.bench.train_step import step_recipe
    from imagenet_fast.recipe.parallel_config import PipelineSchedule

    recipe = step_recipe(model, image_size, batch, precision)
    counts = whole_numbers("--micro-batches", micro_batches, "1,2,4,8,16")
    chosen = names("--schedules", schedules, get_args(PipelineSchedule))
    opt.show_rows(measure(recipe, stages, counts, chosen, sleep, device, rounds), json_file, draw_pipeline, png)


@bench_app.command("profile")
def bench_profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", callback=opt.in_a_directory)],
    model: ModelOption = "alexnet",
    image_size: Pixels = 224,
    batch: opt.Numbers[str] = "64",
    precision: Dtype | None = None,
    steps: opt.Count[int] = 10,
) -> None:
    """Record the compute time of each layer on this hardware, for `bench sync`.

    Args:
        file: The JSON file to write.
        batch: Images in a batch. By several, such as 32,128, `plan` knows the part of a step that does not grow.
        steps: Steps to record of each batch.
    """
    from imagenet_fast.bench.layer_profiler import of_batches, record_profile
    from imagenet_fast.bench.train_step import step_recipe
    from imagenet_fast.cost_model.layer_profile import save_profile
    from imagenet_fast.distributed.init import prepare_device

    if file.suffix != ".json":
        raise UserError(f"{file} does not end in .json, by which `bench sync` knows a profile; name it so")
    device, counts = prepare_device(0)[0], whole_numbers("--batch", batch, "32,128")
    recipes = {count: step_recipe(model, image_size, count, precision) for count in counts}
    profile = of_batches({count: record_profile(recipe, device, steps) for count, recipe in recipes.items()})
    save_profile(profile, file)
    print(f"{len(profile.layers)} layers, {profile.compute_s:.3f} s a step: {file}")


@bench_app.command("data")
def bench_data(
    loaders: opt.Names[str] = "threads,pixels,dali,dali-bare,torchvision-pil,torchvision-io,decoding",
    data: opt.Directory[Path | None] = None,
    resize: Annotated[int | None, typer.Option(metavar="PIXELS", min=16)] = None,
    image_size: Pixels = 224,
    batch: opt.Count[int] = 128,
    workers: opt.Count[int | None] = None,
    seconds: opt.Seconds[float] = 5,
    rounds: opt.Count[int] = 5,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Time the loaders without training: ours, torchvision's, DALI's own, and decoding alone.

    Args:
        loaders: Loaders to time; pixels: two batches of decoded images, read by threads.
        resize: Without --data: shrink the photos to this shorter side first, as data prepare --resize does.
        seconds: Time for each loader in a round.
    """
    from imagenet_fast.bench.dataloaders import Loader, bench_loading
    from imagenet_fast.bench.plots import draw_loading
    from imagenet_fast.distributed.cores import usable_cores

    chosen: list[Loader] = names("--loaders", loaders, get_args(Loader))
    rates = bench_loading(chosen, data, image_size, batch, workers or usable_cores(), seconds, rounds, resize)
    opt.show_rows(rates, json_file, draw_loading, png)
