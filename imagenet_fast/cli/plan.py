"""The commands that predict training on a cluster that nobody has rented: `imagenet-fast plan`.

Options of several commands:
    cluster: A shipped cluster's name, or a TOML file. Default: this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.errors import UserError, warn

if TYPE_CHECKING:
    from imagenet_fast.plan.cluster import Cluster
    from imagenet_fast.plan.fastest import Way
    from imagenet_fast.plan.prediction import Planned
    from imagenet_fast.plan.sweep import Sweep
    from imagenet_fast.recipe.schema import Recipe

T = TypeVar("T")
ClusterOption = Annotated[str | None, typer.Option(metavar="NAME|FILE")]
SweepOption = Annotated[str | None, typer.Option(metavar="KEY=RANGE")]


def plan(
    recipe: opt.Recipe[str],
    cluster: ClusterOption = None,
    gpus: opt.Count[int | None] = None,
    sync: opt.Names[str | None] = None,
    sweep: SweepOption = None,
    scaling: Literal["weak", "strong"] = "weak",
    keys: opt.Keys = opt.NO_KEYS,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Predict a recipe's steps and its time to train on a cluster, for each engine.

    Nothing is run. The table has, for each engine, the step, its exposed
    communication (+), the bytes through a node's NICs, images/s, efficiency
    against one GPU with its band. A dry run of the job comes with it. Accuracy
    is assumed. `plan --fastest` needs no recipe: it says which is best.

    Args:
        gpus: GPUs, on nodes like the cluster's. Default: the recipe's ranks; of this machine all.
        sync: Engines; NAME:WIRE for a wire dtype of its own. Default: all.
        sweep: gpus=8..4096 or nic=10..400 (Gbit/s of a node); ranges double.
        scaling: Keep each GPU's share of the batch, or the global batch.
        keys: Keys to change, as in train. ENGINE.KEY=VALUE changes a key of that engine only.
    """
    from imagenet_fast.plan.prediction import ENGINES, planned_engines, situation_of
    from imagenet_fast.recipe.load import find_recipe, load_recipe

    points = _parsed(sweep, gpus, png)
    name, machine, gpus = _asked(cluster, gpus)
    named = {engine.partition(":")[0].strip() for engine in (ENGINES if sync is None else sync).split(",")}
    own = [override for override in keys if override.partition(".")[0] in named]
    for override in keys:
        if override.partition("=")[0].partition(".")[0].strip() == "sync":
            raise UserError(
                f"--set {override} is of the recipe's engine, and plan predicts those of --sync; write --sync "
                "NAME:WIRE, or --set NAME.KEY=VALUE with the engine's name"
            )
    # The recipe's own engine is not predicted, and must not refuse what those of --sync can do.
    written = load_recipe(find_recipe(recipe), "lazy", [other for other in keys if other not in own])
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

        figure = new_figure()
        kind = "alexnet" if written.model.kind == "alexnet_bn" else written.model.kind
        title = f"{Path(recipe).stem} on {Path(name).stem}, {scaling} scaling"
        draw_plan(predicted, title, Path(name).stem, kind, points.key == "nic", figure)
        figure.savefig(png)


def plan_fastest(
    cluster: ClusterOption = None,
    gpus: opt.Count[int | None] = None,
    cheapest: bool = False,
    model: Literal["resnet50", "alexnet"] = "resnet50",
    sweep: SweepOption = None,
    write: opt.NewFile[Path | None] = None,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Predict which published training reaches its target first on a cluster.

    Nothing is run, and accuracy is assumed. The table has the fastest training
    first, each with the number of GPUs and the engine that suit it best.

    Args:
        gpus: Most GPUs, on nodes like the cluster's. Default: all.
        cheapest: Take the fewest GPU hours instead.
        model: ResNet-50 to 75.9 %, or AlexNet by its three recipes.
        sweep: gpus=8..4096; ranges double.
        write: Write the best one's recipe to this file.
    """
    from imagenet_fast.metrics.tables import table
    from imagenet_fast.plan.fastest import SHOWN, as_recipe, fastest_ways, first_exact, published_trainings, remarks

    points = _parsed(sweep, gpus, png)
    name, machine, gpus = _asked(cluster, gpus)
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
    opt.show(table(found[:SHOWN]), found, json_file)
    print()
    print(*below, sep="\n")
    if write is not None:
        write.write_text(as_recipe(known, first_exact(found), Path(name).stem), encoding="utf-8")
        print(f"{write} has the recipe of the first exact row: `imagenet-fast train --recipe {write}`")
    if png is not None:
        from imagenet_fast.metrics.figures import new_figure
        from imagenet_fast.plan.sweep import draw_fastest

        figure = new_figure()
        draw_fastest(swept, Path(name).stem, figure)
        figure.savefig(png)


def plan_rows(json_file: opt.Json = None) -> None:
    """Compare the model with published and measured steps."""
    from imagenet_fast.plan.rows import all_rows, summary

    found = all_rows()
    opt.show_rows(found, json_file)
    print()
    for row in found:
        if row.left:
            print(f"{row.name}, {row.gpus} GPUs, {row.error:+.1%}: {row.left}")
    print()
    print(*summary(found), sep="\n")


def plan_validate(
    recipe: opt.Recipe[str],
    sync: opt.Names[str] = "ddp,lazy,hybrid,dear,sparse",
    keys: opt.Keys = opt.NO_KEYS,
    json_file: opt.Json = None,
) -> None:
    """Measure engines on a shaped test network, beside predictions from the nominal and the measured link.

    It needs root: four hosts are simulated on this node.

    Args:
        sync: Engines; NAME:WIRE for a wire dtype of its own.
        keys: ENGINE.KEY=VALUE changes a key of an engine.
    """
    from imagenet_fast.bench.engines import bench_sync
    from imagenet_fast.cost_model.layer_profile import load_profile
    from imagenet_fast.netlab.ranks import Lab
    from imagenet_fast.plan.devices import PROFILES
    from imagenet_fast.plan.rows import Shaped, Validated
    from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_engines

    model = load_recipe(find_recipe(recipe)).model.kind
    engines = parse_engines(sync, "bf16", keys)
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
    opt.show_rows(found, json_file)


def _parsed(sweep: str | None, gpus: int | None, png: Path | None) -> Sweep | None:
    """Parse --sweep; refuse what does not go with it, and a picture without it."""
    from imagenet_fast.plan.sweep import parse_sweep

    if sweep is None and png is not None:
        raise UserError(f"--png {png} draws a sweep; add --sweep gpus=8..4096 or nic=10..400")
    points = parse_sweep(sweep) if sweep is not None else None
    if points is not None and points.key == "gpus" and gpus is not None:
        raise UserError("--gpus does not go with --sweep gpus=...; leave one of them out")
    return points


def _asked(name: str | None, gpus: int | None) -> tuple[str, Cluster, int | None]:
    """Return the cluster's name, itself, and the number of GPUs: of this machine all, unless another is asked for."""
    from imagenet_fast.plan.cluster import load_cluster, this_machine

    if name is not None:
        return name, load_cluster(name), gpus
    machine = this_machine()
    return "this machine", machine, gpus or machine.gpus_per_node


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
    from imagenet_fast.plan.prediction import situation_of
    from imagenet_fast.plan.report import dry_run, inputs, verdict, warnings

    opt.show_rows(predicted, json_file)
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
