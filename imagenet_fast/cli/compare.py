"""The commands that set runs side by side: `imagenet-fast compare`, `report` and `timeline`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.cli.options import (
    NO_KEYS,
    DataOption,
    EngineKeysArgument,
    JsonOption,
    NprocOption,
    PngOption,
    RecipeOption,
    SetOption,
    run_directory,
    show,
)
from imagenet_fast.errors import UserError, listed

# Defaults of `compare`. Layouts use an engine that is exact and overlaps as much as it can.
_ENGINES = "ddp,ring,lazy,hybrid,sparse"
_ENGINE_OF_LAYOUTS = "hybrid"


def compare(
    recipe: RecipeOption,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Engines to compare, one run each. Of the recipe's sync keys only sync.wire is kept. "
            f"Default: {_ENGINES}; with --layout: {_ENGINE_OF_LAYOUTS}.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Layouts to compare, such as dp4,tp4,pp2dp2: dpN is N replicas, tpN N shards (parallel.tensor), ppN "
            "N stages (parallel.pipeline); their product is the number of ranks. A pipeline has 4 micro-batches, or "
            "the next number that is at least its stages and divides the batch, unless parallel.micro_batches is set. "
            "Default: the recipe's layout.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1,2", help="Seeds to compare, one run each. Default: the recipe's seed.")
    ] = None,
    data: DataOption = None,
    keys: EngineKeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    nproc: NprocOption = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Make each rank a simulated node with its own link of this rate, such as 250mbit."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=run_directory, help="Directory for all runs. Default: a new one in runs."),
    ] = None,
    json_file: JsonOption = None,
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
    import torch

    from imagenet_fast.compare.contest import compare as train_all
    from imagenet_fast.compare.contest import contestants
    from imagenet_fast.compare.layouts import parse_layouts
    from imagenet_fast.compare.report import draw_curves, summaries
    from imagenet_fast.launch.nodes import local_ranks
    from imagenet_fast.metrics.run_dir import RunDir, new_folder
    from imagenet_fast.metrics.run_result import STOPPED
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.units import whole_numbers

    folder = out or new_folder(Path(recipe).stem, "compare")
    seeded = [] if seeds is None else whole_numbers("--seeds", seeds, "1,2,3", zero=True)
    if rate is not None and torch.cuda.device_count():
        raise UserError(
            "--rate shapes links that GPUs of one node do not use; leave it out, or set CUDA_VISIBLE_DEVICES= in the "
            "environment to compare on the CPU"
        )
    ranks = local_ranks(nproc)
    layouts = [] if layout is None else parse_layouts(layout, ranks)
    usual = _ENGINE_OF_LAYOUTS if layouts else _ENGINES
    engines = listed("--sync", usual if sync is None else sync, str)
    runs = contestants(recipe, ranks, engines, seeded, [*overrides, *keys], layouts)
    ended = train_all(recipe, runs, data=data, ranks=ranks, rate=rate, folder=folder)
    past = [run.past for run in ended]
    rows = summaries(past)
    failed = [run for run in ended if run.failed]
    print()
    show(table(rows), [asdict(row) for row in rows], json_file)
    if layouts and len(engines) == 1:
        print(f"every layout with the engine {engines[0]}")
    for run in failed:
        left = f"its partial results are in {run.past.folder}" if run.past.folder.exists() else "it left nothing"
        print(f"{run.past.label} ended with exit code {run.exit_code}; {left}")
        if run.exit_code == STOPPED and RunDir(run.past.folder).job.is_file():
            print(f"imagenet-fast train --resume {shlex.quote(str(run.past.folder))} --nproc {ranks} goes on with it")
    print(f"in TensorBoard: tensorboard --logdir {shlex.quote(str(folder))}")
    png = folder / "compare.png"
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(past, png)
    print(f"drawn to {png}")
    if failed or len(ended) < len(runs):  # fewer runs ended: the command was interrupted
        raise typer.Exit(1)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    png: PngOption = None,
    json_file: JsonOption = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Judge runs of ResNet-50 by MLCommons' epochs to 75.9 % at their batch.")
    ] = False,
) -> None:
    """Compare past runs: print a table with time to accuracy, and draw their curves with --png."""
    from imagenet_fast.compare.report import draw_curves, summaries
    from imagenet_fast.metrics.past_run import read_run
    from imagenet_fast.metrics.tables import table

    once: dict[Path, Path] = {}
    for folder in runs:
        once.setdefault(folder.resolve(), folder)
    past = [read_run(folder) for folder in once.values()]
    rows = summaries(past)
    show(table(rows), [asdict(row) for row in rows], json_file)
    if reference:
        from imagenet_fast.compare.reference import SOURCE, judge_by_reference

        for row, run in zip(rows, past, strict=True):
            print(f"{row.run}: {judge_by_reference(run)}")
        print(SOURCE)
    if png is not None:
        draw_curves(past, png)
        print(f"drawn to {png}")


def timeline(
    traces: Annotated[
        list[Path], typer.Argument(metavar="RUN|FILE...", help="Runs of `train --trace`, or trace files.")
    ],
    png: PngOption = None,
    json_file: JsonOption = None,
    until: Annotated[
        float | None,
        typer.Option(metavar="MS", min=1, max=1e9, help="Where the time axis ends. Default: with the longest step."),
    ] = None,
) -> None:
    """Show where the time of a step goes: computation, messages and waits, one trace beside the other.

    Prints a table of milliseconds, and draws the steps with --png. A step
    begins with its backward and ends with the next forward. Of each trace the
    step of median length is taken. Trace files come from `train --trace` and
    `bench sync --trace DIR`.
    """
    from imagenet_fast.compare.timeline import draw_timelines, read_timeline
    from imagenet_fast.metrics.tables import table

    steps = [read_timeline(trace) for trace in traces]
    show(table(steps), [asdict(step) for step in steps], json_file)
    if png is not None:
        draw_timelines(steps, png, until)
        print(f"drawn to {png}")
