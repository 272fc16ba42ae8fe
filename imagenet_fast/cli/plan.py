"""The command that predicts training on a cluster that nobody has rented: `imagenet-fast plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from imagenet_fast.cli.options import NO_KEYS, JsonOption, PngOption, SetOption, in_a_directory, refuse_beside, show
from imagenet_fast.errors import UserError, warn

if TYPE_CHECKING:
    from imagenet_fast.plan.cluster import Cluster
    from imagenet_fast.plan.fastest import Way
    from imagenet_fast.plan.prediction import Planned
    from imagenet_fast.plan.sweep import Sweep
    from imagenet_fast.recipe.schema import Recipe

T = TypeVar("T")
_PLAN = ("recipe", "sync", "scaling", "overrides")
"""Parameters of a recipe's plan alone."""
_SEARCH = ("model", "write")
"""Parameters of --fastest and --cheapest alone."""


def plan(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[rows|validate] [KEY=VALUE]",
            help="rows: compare the model with published and measured steps. validate: as root, measure the engines on "
            "the shaped test network. KEY=VALUE: as in train; ENGINE.KEY=VALUE for an engine of --sync.",
        ),
    ] = NO_KEYS,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="Name of a shipped recipe, or a TOML file. Required without --fastest."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A shipped cluster's name, or a TOML file. Default: this machine."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="On nodes like the cluster's. Default: the recipe's ranks; of this machine, or with --fastest, all.",
        ),
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
    overrides: SetOption = NO_KEYS,
    fastest: Annotated[
        bool, typer.Option("--fastest", help="Which published training reaches its target first on up to --gpus GPUs?")
    ] = False,
    cheapest: Annotated[bool, typer.Option("--cheapest", help="As --fastest, by GPU hours.")] = False,
    model: Annotated[
        Literal["resnet50", "alexnet"],
        typer.Option(help="With --fastest: ResNet-50 to 75.9 %, or AlexNet by its three recipes."),
    ] = "resnet50",
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=in_a_directory, help="With --fastest: write the best one's recipe."),
    ] = None,
    json_file: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Predict a recipe's steps and its time to train on a cluster, for each engine.

    Nothing is run. The table has, for each engine, the step, its exposed
    communication (+), the bytes through a node's NICs, images/s, efficiency
    against one GPU with its band. A dry run of the job comes with it. Accuracy
    is assumed. With --fastest, the published trainings are predicted instead,
    the fastest first.
    """
    what, *changes = words if words[:1] in (["rows"], ["validate"]) else ["", *words]
    if what == "rows":
        others = (*_PLAN, *_SEARCH, "cluster", "gpus", "sweep", "fastest", "cheapest", "png")
        refuse_beside(context, others, "does not go with plan rows, which has its own; leave one of them out")
        _no_words(changes, "plan rows")
        _show_rows(json_file)
        return
    if fastest or cheapest:
        refuse_beside(context, _PLAN, "does not go with --fastest, which tries them all; leave one of them out")
        _no_words([what, *changes] if what else changes, "--fastest")
        _show_fastest(model, _asked(cluster, gpus), cheapest, _parsed(context, sweep, png), write, json_file, png)
        return
    refuse_beside(context, _SEARCH, "goes with --fastest or --cheapest alone; add one of these")
    if recipe is None:
        raise UserError(
            "--recipe is missing; name one of `imagenet-fast recipes`, or ask what is best on a cluster by --fastest"
        )
    if what == "validate":
        refuse_beside(
            context,
            ("cluster", "gpus", "sweep", "scaling", "png"),
            "does not go with plan validate, which has four hosts; leave one of them out",
        )
        _validate(recipe, sync or "ddp,lazy,hybrid,dear,sparse", [*changes, *overrides], json_file)
        return
    points = _parsed(context, sweep, png)
    _show_plan(recipe, _asked(cluster, gpus), sync, points, scaling, [*changes, *overrides], json_file, png)


def _no_words(words: list[str], what: str) -> None:
    if words:
        raise UserError(f"{words[0]} does not go with {what}; leave it out")


def _parsed(context: typer.Context, sweep: str | None, png: Path | None) -> Sweep | None:
    """Parse --sweep; refuse what does not go with it, and a picture without it."""
    from imagenet_fast.plan.sweep import parse_sweep

    if sweep is None and png is not None:
        raise UserError(f"--png {png} draws a sweep; add --sweep gpus=8..4096 or nic=10..400")
    points = parse_sweep(sweep) if sweep is not None else None
    if points is not None and points.key == "gpus":
        refuse_beside(context, ("gpus",), "does not go with --sweep gpus=...; leave one of them out")
    return points


def _asked(name: str | None, gpus: int | None) -> tuple[str, Cluster, int | None]:
    """Return the cluster's name, itself, and the number of GPUs: of this machine all, unless another is asked for."""
    from imagenet_fast.plan.cluster import load_cluster, this_machine

    if name is not None:
        return name, load_cluster(name), gpus
    machine = this_machine()
    return "this machine", machine, gpus or machine.gpus_per_node


def _show_plan(
    recipe: str, asked: tuple[str, Cluster, int | None], sync: str | None, points: Sweep | None,
    scaling: Literal["weak", "strong"], overrides: list[str], json_file: Path | None, png: Path | None,
) -> None:  # fmt: skip
    from imagenet_fast.plan.prediction import ENGINES, planned_engines, situation_of
    from imagenet_fast.recipe.load import find_recipe, load_recipe

    name, machine, gpus = asked
    named = {engine.partition(":")[0].strip() for engine in (ENGINES if sync is None else sync).split(",")}
    own = [override for override in overrides if override.partition(".")[0] in named]
    for override in overrides:
        if override.partition("=")[0].partition(".")[0].strip() == "sync":
            raise UserError(
                f"--set {override} is of the recipe's engine, and plan predicts those of --sync; write --sync "
                "NAME:WIRE, or --set NAME.KEY=VALUE with the engine's name"
            )
    # The recipe's own engine is not predicted, and must not refuse what those of --sync can do.
    written = load_recipe(find_recipe(recipe), "lazy", [other for other in overrides if other not in own])
    try:
        engines = planned_engines(sync, own)
        if points is not None and points.key == "gpus":
            predicted = _over_gpus(points.values, lambda n: situation_of(written, machine, n, scaling).rows(engines))
        else:
            machines = [machine] if points is None else [machine.with_nics(float(gbit)) for gbit in points.values]
            situations = [situation_of(written, one, gpus or written.ranks, scaling) for one in machines]
            predicted = [row for situation in situations for row in situation.rows(engines)]
    except UserError as error:
        of_cluster = str(error).startswith(("nic.", "inside.", "device"))
        raise UserError(f"{name}: {error}" if of_cluster else str(error)) from None
    _print_plan(written, machine, scaling, predicted, points is None, json_file)
    if png is not None and points is not None:
        from imagenet_fast.metrics.figures import new_figure
        from imagenet_fast.plan.sweep import draw_plan

        figure = new_figure(png, 9, 5)
        kind = "alexnet" if written.model.kind == "alexnet_bn" else written.model.kind
        title = f"{Path(recipe).stem} on {Path(name).stem}, {scaling} scaling"
        draw_plan(predicted, title, Path(name).stem, kind, points.key == "nic", figure)
        figure.savefig(png)


def _over_gpus(values: tuple[int, ...], predict: Callable[[int], list[T]]) -> list[T]:
    """Predict each number of GPUs; one that cannot be is left out with a warning, unless all are."""
    predicted: list[T] = []
    refused = None
    for count in values:
        try:
            predicted += predict(count)
        except UserError as error:
            refused = error
            warn(f"{count} GPUs are left out: {error}")
    if refused is not None and not predicted:
        raise refused
    return predicted


def _print_plan(
    written: Recipe, machine: Cluster, scaling: Literal["weak", "strong"], predicted: list[Planned], alone: bool,
    json_file: Path | None,
) -> None:  # fmt: skip
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.plan.prediction import situation_of
    from imagenet_fast.plan.report import dry_run, inputs, verdict, warnings

    show(table(predicted), [asdict(row) for row in predicted], json_file)
    print()
    for place in dict.fromkeys((row.gpus, row.nic_gbit) for row in predicted):
        own = [row for row in predicted if (row.gpus, row.nic_gbit) == place]
        rate = "" if place[1] is None else f", {place[1]:g} Gbit/s"
        prefix = "" if alone else f"{place[0]} GPUs{rate}: "
        print(prefix + verdict(own))
    last = next((row for row in reversed(predicted) if row.chosen), predicted[-1])
    print()
    situation = situation_of(written, machine, last.gpus, scaling)
    print(*dry_run(written, situation, last), *inputs(machine, written.model.kind), sep="\n")
    for doubt in warnings(situation, last):
        warn(doubt)


def _show_fastest(
    model: Literal["resnet50", "alexnet"], asked: tuple[str, Cluster, int | None], cheapest: bool, points: Sweep | None,
    write: Path | None, json_file: Path | None, png: Path | None,
) -> None:  # fmt: skip
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.plan.fastest import SHOWN, as_recipe, fastest_ways, first_exact, published_trainings, remarks

    name, machine, gpus = asked
    if points is not None and (points.key == "nic" or write is not None):
        option = "--write" if write is not None else "--sweep nic="
        raise UserError(f"{option} does not go with --fastest over several numbers of GPUs; write --gpus instead")
    known = published_trainings(model)
    swept: list[tuple[int, Way]] = []
    if points is None:
        found, left_out = fastest_ways(machine, known, gpus or machine.nodes * machine.gpus_per_node, cheapest)
        below = list(remarks(machine, found, left_out, cheapest))
    else:
        swept = _over_gpus(
            points.values, lambda count: [(count, first_exact(fastest_ways(machine, known, count, cheapest)[0]))]
        )
        found = [way for _, way in swept]
        below = ["the best exact way on up to so many GPUs each: predicted, not run"]
    show(table(found[:SHOWN]), [asdict(way) for way in found], json_file)
    print()
    print(*below, sep="\n")
    if write is not None:
        write.write_text(as_recipe(known, first_exact(found), Path(name).stem), encoding="utf-8")
        print(f"{write} has the recipe of the first exact row: `imagenet-fast train --recipe {write}`")
    if png is not None:
        from imagenet_fast.metrics.figures import new_figure
        from imagenet_fast.plan.sweep import draw_fastest

        figure = new_figure(png, 9, 5)
        draw_fastest(swept, Path(name).stem, figure)
        figure.savefig(png)


def _show_rows(json_file: Path | None) -> None:
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.plan.rows import all_rows, summary

    found = all_rows()
    show(table(found), [asdict(row) for row in found], json_file)
    print()
    for row in found:
        if row.left:
            print(f"{row.name}, {row.gpus} GPUs, {row.error:+.1%}: {row.left}")
    print()
    print(*summary(found), sep="\n")


def _validate(recipe: str, sync: str, overrides: list[str], json_file: Path | None) -> None:
    """Measure the engines between four shaped hosts, beside predictions from the nominal and the measured link."""
    from imagenet_fast.bench.engines import bench_sync
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.plan.devices import PROFILES
    from imagenet_fast.plan.rows import Shaped, Validated
    from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_engines

    model = load_recipe(find_recipe(recipe)).model.kind
    engines = parse_engines(sync, "bf16", overrides)
    name = PROFILES.get(model)
    if name is None:
        raise UserError(
            f"{model} has no layer profile; record one by `imagenet-fast bench profile FILE --model {model}`"
        )
    scale, mbit, hosts = 4, 250, 4
    times = bench_sync(
        load_profile(name).scaled_to(1.4), engines, Lab(hosts, 1, f"{mbit}mbit"), scale, rounds=2, steps=2
    )
    found: list[Validated] = []
    for settings, time in zip(engines, times, strict=False):
        steps = Shaped(profile=name, scale=scale, hosts=hosts, mbit=mbit, compute_s=time.compute_s)
        nominal_s = steps.predicted_s(settings)
        error = nominal_s / time.step_s - 1
        found.append(Validated(settings.kind, settings.wire, nominal_s, time.predicted_s, time.step_s, error))
    show(table(found), [asdict(row) for row in found], json_file)
