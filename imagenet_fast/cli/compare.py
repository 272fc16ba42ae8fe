"""The commands that set runs side by side: `imagenet-fast compare`, `report` and `timeline`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.errors import UserError, listed


def compare(
    recipe: opt.Recipe[str],
    sync: opt.Names[str | None] = None,
    layout: opt.Names[str | None] = None,
    seeds: opt.Numbers[str | None] = None,
    data: opt.Directory[Path | None] = None,
    keys: opt.Keys = opt.NO_KEYS,
    nproc: opt.Count[int | None] = None,
    rate: opt.Rate[str | None] = None,
    out: opt.RunDirectory = None,
    json_file: opt.Json = None,
) -> None:
    """Train a recipe once per engine or layout, with the same seed, and compare time and steps to accuracy.

    In the table s/step is the median over all steps but the first ten; each
    step counts with its log interval's mean. MB/step is what a rank sends per
    step for gradients and activations, counted by the program. With --rate,
    link MB is what a rank puts on its host's link during training, counted by
    the kernel. Both are means over the same steps and all ranks.

    The curves are drawn to compare.png, and `tensorboard --logdir DIR` shows
    every run. If a run fails, the others continue, and the exit code is 1.

    Args:
        sync: Engines to compare, one run each. Of the recipe's sync keys only sync.wire is kept. Default:
            ddp,ring,lazy,hybrid,sparse; with --layout: hybrid.
        layout: Layouts to compare, such as dp4,tp4,pp2dp2: dpN is N replicas, tpN N shards (parallel.tensor), ppN N
            stages (parallel.pipeline); their product is the number of ranks. A pipeline has 4 micro-batches, or the
            next number that is at least its stages and divides the batch, unless parallel.micro_batches is set.
            Default: the recipe's layout.
        seeds: Seeds to compare, one run each. Default: the recipe's seed.
        keys: Keys to change, as in train. ENGINE.KEY=VALUE changes a key of that engine only.
        rate: Make each rank a simulated node with its own link of this rate, such as 250mbit.
        out: Directory for all runs. Default: a new one in runs.
    """
    import torch

    from imagenet_fast.compare.contest import compare as train_all
    from imagenet_fast.compare.contest import contestants
    from imagenet_fast.compare.layouts import parse_layouts
    from imagenet_fast.compare.report import draw_curves, summaries
    from imagenet_fast.launch.nodes import local_ranks
    from imagenet_fast.run.result import STOPPED
    from imagenet_fast.run.run_dir import RunDir, new_folder
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
    usual = "hybrid" if layouts else "ddp,ring,lazy,hybrid,sparse"  # of layouts one that is exact and overlaps most
    engines = listed("--sync", usual if sync is None else sync, str)
    runs = contestants(recipe, ranks, engines, seeded, keys, layouts)
    ended = train_all(recipe, runs, data=data, ranks=ranks, rate=rate, folder=folder)
    past = [run.past for run in ended]
    failed = [run for run in ended if run.failed]
    print()
    opt.show_rows(summaries(past), json_file)
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
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    png: opt.Png = None,
    json_file: opt.Json = None,
    reference: bool = False,
) -> None:
    """Compare past runs: print a table with time to accuracy, and draw their curves with --png.

    Args:
        runs: Run directories.
        reference: Judge runs of ResNet-50 by MLCommons' epochs to 75.9 % at their batch.
    """
    from imagenet_fast.compare.report import draw_curves, summaries
    from imagenet_fast.metrics.past_run import read_run

    once = {folder.resolve(): folder for folder in runs}
    past = [read_run(folder) for folder in once.values()]
    rows = summaries(past)
    opt.show_rows(rows, json_file)
    if reference:
        from imagenet_fast.compare.reference import SOURCE, judge_by_reference

        for row, run in zip(rows, past, strict=True):
            print(f"{row.run}: {judge_by_reference(run)}")
        print(SOURCE)
    if png is not None:
        draw_curves(past, png)
        print(f"drawn to {png}")


def timeline(
    traces: Annotated[list[Path], typer.Argument(metavar="RUN|FILE...")],
    png: opt.Png = None,
    json_file: opt.Json = None,
    until: Annotated[float | None, typer.Option(metavar="MS", min=1, max=1e9)] = None,
) -> None:
    """Show where the time of a step goes: computation, messages and waits, one trace beside the other.

    Prints a table of milliseconds, and draws the steps with --png. A step
    begins with its backward and ends with the next forward. Of each trace the
    step of median length is taken. Trace files come from `train --trace` and
    `bench sync --trace DIR`.

    Args:
        traces: Runs of `train --trace`, or trace files.
        until: Where the time axis ends. Default: with the longest step.
    """
    from imagenet_fast.compare.timeline import draw_timelines, read_timeline

    steps = [read_timeline(trace) for trace in traces]
    opt.show_rows(steps, json_file)
    if png is not None:
        draw_timelines(steps, png, until)
        print(f"drawn to {png}")
