"""The commands that predict training on a cluster that nobody has rented: `imagenet-fast plan`.

Options of several commands:
    cluster: A shipped cluster's name, or a TOML file. Default: this machine.
    pace: Whose steps: this program's, launched kernel by kernel or replayed from a CUDA graph, or those of published
        results, such as NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.errors import UserError, warn

if TYPE_CHECKING:
    from imagenet_fast.plan.cluster import Cluster
    from imagenet_fast.plan.prediction import Planned, Situation

T = TypeVar("T")
ClusterOption = Annotated[str | None, typer.Option(metavar="NAME|FILE")]
Pace = Literal["launched", "replayed", "published"]
SweepOption = Annotated[str | None, typer.Option(metavar="KEY=RANGE")]


def plan(
    recipe: opt.Recipe[str | None] = None,
    cluster: ClusterOption = None,
    gpus: opt.Count[int | None] = None,
    sync: opt.Names[str | None] = None,
    sweep: SweepOption = None,
    scaling: Literal["weak", "strong"] = "weak",
    pace: Pace = "launched",
    keys: opt.Keys = opt.NO_KEYS,
    json_file: opt.Json = None,
    png: opt.Png = None,
) -> None:
    """Predict a recipe's steps and its time to train on a cluster, for each engine.

    Nothing is run. The table has, for each engine, the step, its exposed
    communication (+), the bytes through a node's NICs, images/s, efficiency
    against one GPU with its band. A dry run of the job comes with it. Accuracy
    is assumed. `plan fastest` needs no recipe: it says which is best.

    Args:
        gpus: GPUs, on nodes like the cluster's. Default: the recipe's ranks; of this machine all.
        sync: Engines; NAME:WIRE for a wire dtype of its own. Default: all.
        sweep: gpus=8..4096 or nic=10..400 (Gbit/s of a node); ranges double.
        scaling: Keep each GPU's share of the batch, or the global batch.
        keys: Keys to change, as in train. ENGINE.KEY=VALUE changes a key of that engine only.
    """
    from imagenet_fast.plan.prediction import planned_engines, situation_of
    from imagenet_fast.plan.report import dry_run, inputs, verdict, warnings
    from imagenet_fast.plan.sweep import draw_plan
    from imagenet_fast.recipe.load import load_recipe
    from imagenet_fast.recipe.sync_config import engines as all_engines

    if recipe is None:
        raise UserError("which recipe? add --recipe NAME; `plan fastest` finds the best")
    of_engines = [key for key in keys if key.partition("=")[0].partition(".")[0].strip() in ("sync", *all_engines())]
    engines = planned_engines(sync, of_engines)
    # The recipe's own engine is not predicted, and must not refuse what those of --sync can do.
    written = load_recipe(recipe, "lazy", [key for key in keys if key not in of_engines])

    def predict(machine: Cluster, count: int) -> tuple[Situation, list[Planned]]:
        situation = situation_of(written, machine, count, scaling)
        return situation, situation.rows(engines)

    predicted = _each(_places(cluster, pace, gpus, written.reference_ranks, sweep, png), predict)
    rows = [row for _, planned in predicted for row in planned]
    title = f"{Path(recipe).stem} on {predicted[-1][0].cluster.name}, {scaling} scaling"
    opt.show_rows(rows, json_file, lambda _, figure: draw_plan(predicted, title, figure), png)
    print()
    for situation, planned in predicted:
        rate = situation.cluster.nic.node_gbit
        place = f"{situation.batching.ranks} GPUs{'' if rate is None else f', {rate:g} Gbit/s'}: "
        print(("" if sweep is None else place) + verdict(planned, situation.model_error))
    print()
    last = next((row for row in planned if row.chosen), planned[-1])
    print(*dry_run(written, situation, last), *inputs(situation.cluster, written.model.kind), sep="\n")
    for doubt in warnings(situation, last):
        warn(doubt)


def plan_fastest(
    cluster: ClusterOption = None,
    gpus: opt.Count[int | None] = None,
    cheapest: bool = False,
    model: Literal["resnet50", "alexnet"] = "resnet50",
    sweep: SweepOption = None,
    pace: Pace = "launched",
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
    from imagenet_fast.plan.fastest import SHOWN, as_recipe, fastest_ways, published_trainings, remarks
    from imagenet_fast.plan.report import inputs
    from imagenet_fast.plan.sweep import draw_fastest

    if sweep is not None and (write is not None or sweep.startswith("nic")):
        option = "--write" if write is not None else "--sweep nic="
        raise UserError(f"{option} does not go with `plan fastest` over several numbers of GPUs; write --gpus instead")
    known = published_trainings(model)
    places = _places(cluster, pace, gpus, None, sweep, png)
    machine = places[0][0]
    predicted = _each(places, lambda machine, count: (count, *fastest_ways(machine, known, count, cheapest)))
    swept = [(count, next(way for way in ways if way.exact)) for count, ways, _ in predicted]
    if sweep is None:
        ((_, found, left_out),) = predicted
        below = [*remarks(machine, found, left_out, cheapest), *inputs(machine, known[0].recipe.model.kind)]
    else:
        found = [way for _, way in swept]
        below = ["the best exact way on up to so many GPUs each: predicted, not run"]
    opt.show(table(found[:SHOWN]), found, json_file, partial(draw_fastest, swept, machine.name), png)
    print()
    print(*below, sep="\n")
    if write is not None:
        write.write_text(as_recipe(known, swept[0][1], machine), encoding="utf-8")
        print(f"{write} has the recipe of the first exact row: `imagenet-fast train --recipe {write}`")


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
    """Measure engines on `test-network`, a shaped one, beside predictions from the nominal and the measured link.

    It needs root: four hosts are simulated on this node.

    Args:
        sync: Engines; NAME:WIRE for a wire dtype of its own.
        keys: ENGINE.KEY=VALUE changes a key of an engine.
    """
    from imagenet_fast.bench.plan_validation import validate
    from imagenet_fast.plan.prediction import planned_engines
    from imagenet_fast.recipe.load import load_recipe

    opt.show_rows(validate(load_recipe(recipe).model.kind, planned_engines(sync, keys)), json_file)


def _places(
    cluster: str | None, pace: Pace, gpus: int | None, ranks: int | None, sweep: str | None, png: Path | None
) -> list[tuple[Cluster, int]]:
    """Return the clusters and numbers of GPUs that options ask for; without --gpus ``ranks``, or all of a machine."""
    from imagenet_fast.plan.cluster import load_cluster, this_machine
    from imagenet_fast.plan.sweep import parse_sweep

    if sweep is None and png is not None:
        raise UserError(f"--png {png} draws a sweep; add --sweep gpus=8..4096 or nic=10..400")
    key, values = ("", ()) if sweep is None else parse_sweep(sweep)
    machine = this_machine(pace) if cluster is None else load_cluster(cluster, pace)
    if key == "gpus":
        if gpus is not None:
            raise UserError("--gpus does not go with --sweep gpus=...; leave one of them out")
        return [(machine, count) for count in values]
    every = machine.nodes * machine.gpus_per_node
    count = gpus or (every if cluster is None or ranks is None else ranks)
    return [(machine.with_nics(float(gbit)), count) for gbit in values] or [(machine, count)]


def _each(places: Sequence[tuple[Cluster, int]], predict: Callable[[Cluster, int], T]) -> list[T]:
    """Predict each place; one that cannot be is left out with a warning, unless all are."""
    predicted: list[T] = []
    refused: list[tuple[int, UserError]] = []
    for cluster, gpus in places:
        try:
            predicted.append(predict(cluster, gpus))
        except UserError as error:
            refused.append((gpus, error))
    if not predicted:
        raise refused[0][1]
    for gpus, sentence in refused:
        warn(f"{gpus} GPUs are left out: {sentence}")
    return predicted
