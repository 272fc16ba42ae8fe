"""The command that predicts training on a cluster that nobody has rented: `imagenet-fast plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from imagenet_fast.cli.options import JsonOption, PngOption, refuse_beside
from imagenet_fast.errors import UserError, warn

if TYPE_CHECKING:
    from imagenet_fast.plan.prediction import Planned, Situation


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH", help="Name of a shipped recipe, or a TOML file. Required unless --rows is given."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A shipped cluster's name, or a TOML file.")
    ] = "gradientflow-v",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="On nodes like the cluster's. Default: the recipe's ranks.")
    ] = None,
    sync: Annotated[
        str | None, typer.Option(metavar="A,B", help="Engines; NAME:WIRE for a wire dtype of its own. Default: all.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=RANGE", help="gpus=8..4096 or nic=10..400 (Gbit/s of a node); ranges double."),
    ] = None,
    scaling: Annotated[
        Literal["weak", "strong"], typer.Option(help="Keep each GPU's share of the batch, or the global batch.")
    ] = "weak",
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="As in train; ENGINE.KEY=VALUE for an engine of --sync."),
    ] = [],  # noqa: B006
    rows: Annotated[
        bool, typer.Option("--rows", help="Compare the model with published and measured steps instead.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="As root: measure the engines on the shaped test network instead.")
    ] = False,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Predict a recipe's steps and its time to train on a cluster, for each engine.

    Nothing is run. The table has, for each engine, the step, its exposed
    communication (+), the bytes through a node's NICs, images/s, efficiency
    against one GPU with its band, and against one node. A dry run of the job
    comes with it. Accuracy is assumed.
    """
    if rows:
        no_rows = ("recipe", "cluster", "gpus", "sync", "sweep", "scaling", "overrides", "validate", "png")
        refuse_beside(context, no_rows, "does not go with --rows, which has its own; leave one of them out")
        _show_rows(json_file)
        return
    if recipe is None:
        raise UserError("--recipe is missing; name one of `imagenet-fast recipes`, or give --rows")
    from imagenet_fast.plan.cluster import load_cluster
    from imagenet_fast.plan.devices import find_device
    from imagenet_fast.plan.prediction import ENGINES, Situation, planned_engines
    from imagenet_fast.plan.sweep import parse_sweep
    from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_engines

    if validate:
        no_validate = ("cluster", "gpus", "sweep", "scaling", "png")
        refuse_beside(context, no_validate, "does not go with --validate, which has four hosts; leave one of them out")
        model = load_recipe(find_recipe(recipe)).model.kind
        _validate(model, parse_engines(sync or "ddp,lazy,hybrid,dear,sparse", "bf16", overrides), json_file)
        return
    named = {name.partition(":")[0].strip() for name in (ENGINES if sync is None else sync).split(",")}
    own = [override for override in overrides if override.partition(".")[0] in named]
    for override in overrides:
        if override.partition("=")[0].partition(".")[0].strip() == "sync":
            raise UserError(
                f"--set {override} is of the recipe's engine, and plan predicts those of --sync; write --sync "
                "NAME:WIRE, or --set NAME.KEY=VALUE with the engine's name"
            )
    points = parse_sweep(sweep) if sweep is not None else None
    if points is not None and points.key == "gpus":
        refuse_beside(context, ("gpus",), "does not go with --sweep gpus=...; leave one of them out")
    # The recipe's own engine is not predicted, and must not refuse what those of --sync can do.
    written = load_recipe(find_recipe(recipe), "lazy", [other for other in overrides if other not in own])
    machine = load_cluster(cluster)
    try:
        situation = Situation(written, machine, find_device(machine.device, machine.device_batch), scaling)
        engines = planned_engines(sync, "bf16", own)
        figure = _figure(png, points is not None)
        most = gpus or written.ranks
        predicted: list[Planned] = []
        if points is None:
            predicted = situation.rows(engines, most)
        elif points.key == "nic":
            for gbit in points.values:
                predicted += situation.rows(engines, most, float(gbit))
        else:
            predicted = _over_gpus(situation, engines, points.values)
    except UserError as error:
        raise UserError(
            f"{cluster}: {error}" if str(error).startswith(("nic.", "inside.", "device")) else str(error)
        ) from None
    _print_plan(situation, engines, predicted, points is None)
    if json_file is not None:
        from imagenet_fast.metrics.tables import write_json

        write_json([asdict(row) for row in predicted], json_file)
    if figure is not None:
        from imagenet_fast.plan.figures import draw_plan

        title = f"{Path(recipe).stem} on {Path(cluster).stem}, {scaling} scaling"
        model = "alexnet" if written.model.kind == "alexnet_bn" else written.model.kind
        draw_plan(predicted, title, Path(cluster).stem, model, points is not None and points.key == "nic", figure)
        figure.savefig(png)


def _figure(png: Path | None, swept: bool) -> Any:
    """Return an empty figure for ``png``, or None without one; refuse a picture of a single point."""
    if png is None:
        return None
    if not swept:
        raise UserError(f"--png {png} draws a sweep; add --sweep gpus=8..4096 or nic=10..400")
    from imagenet_fast.bench.plots import new_figure

    return new_figure(png, 9, 5)


def _over_gpus(situation: Situation, engines: Any, values: tuple[int, ...]) -> list[Planned]:
    """Predict each number of GPUs; one that cannot be is left out with a warning, unless all are."""
    predicted: list[Planned] = []
    refused = None
    for count in values:
        try:
            predicted += situation.rows(engines, count)
        except UserError as error:
            refused = error
            warn(f"{count} GPUs are left out: {error}")
    if refused is not None and not predicted:
        raise refused
    return predicted


def _print_plan(situation: Situation, engines: Any, predicted: list[Planned], alone: bool) -> None:
    from rich.console import Console

    from imagenet_fast.plan.dry_run import dry_run
    from imagenet_fast.plan.report import inputs, other_computes, verdict
    from imagenet_fast.plan.tables import plan_table

    Console().print(plan_table(predicted))
    print()
    for place in dict.fromkeys((row.gpus, row.nic_gbit) for row in predicted):
        own = [row for row in predicted if (row.gpus, row.nic_gbit) == place]
        rate = "" if place[1] is None else f", {place[1]:g} Gbit/s"
        prefix = "" if alone else f"{place[0]} GPUs{rate}: "
        print(prefix + verdict(own))
    last = next((row for row in reversed(predicted) if row.chosen), predicted[-1])
    if alone:
        for line in other_computes(situation, engines, last.gpus):
            print(line)
    print()
    job = dry_run(situation, last)
    for line in (*job.lines, *inputs(situation)):
        print(line)
    for doubt in job.warnings:
        warn(doubt)


def _show_rows(json_file: Path | None) -> None:
    from rich.console import Console

    from imagenet_fast.metrics.tables import write_json
    from imagenet_fast.plan.rows import all_rows, summary
    from imagenet_fast.plan.tables import rows_table

    found = all_rows()
    Console().print(rows_table(found))
    print()
    for row in found:
        if row.left:
            print(f"{row.name}, {row.gpus} GPUs, {row.error:+.1%}: {row.left}")
    print()
    print(*summary(found), sep="\n")
    if json_file is not None:
        write_json([asdict(row) for row in found], json_file)


def _validate(model: str, engines: Any, json_file: Path | None) -> None:
    """Measure the engines between four shaped hosts, beside predictions from the nominal and the measured link."""
    from rich.console import Console

    from imagenet_fast.bench.engines import bench_sync
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.metrics.tables import compact_table, write_json
    from imagenet_fast.plan.devices import PROFILES
    from imagenet_fast.plan.published import Shaped
    from imagenet_fast.plan.rows import shaped_step_s

    name = PROFILES.get(model)
    if name is None:
        raise UserError(
            f"{model} has no layer profile; record one by `imagenet-fast bench profile FILE --model {model}`"
        )
    scale, mbit, hosts = 4, 250, 4
    times = bench_sync(load_profile(name).scaled_to(1.4), engines, hosts, 1, f"{mbit}mbit", scale, rounds=2, steps=2)
    found: list[dict[str, Any]] = []
    for settings, time in zip(engines, times, strict=False):
        nominal_s = shaped_step_s(Shaped(name, scale, hosts, mbit, time.compute_s, ()), settings)
        found.append({
            "engine": settings.kind, "wire": settings.wire, "nominal_s": nominal_s, "fitted_s": time.predicted_s,
            "measured_s": time.step_s, "error": nominal_s / time.step_s - 1,
        })  # fmt: skip
    text = ("engine", "wire")
    numbers = ("nominal_s", "fitted_s", "measured_s")
    lines = ([*(r[key] for key in text), *(f"{r[key]:.3f}" for key in numbers), f"{r['error']:+.1%}"] for r in found)
    Console().print(compact_table(text, ("nominal link", "fitted link", "measured", "nominal's error"), lines))
    if json_file is not None:
        write_json(found, json_file)
