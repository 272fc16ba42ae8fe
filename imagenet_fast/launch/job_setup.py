"""Build a job from a recipe and the command line, checked before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from imagenet_fast.data.quarantine import left_out
from imagenet_fast.data.source import check_validation, find_data
from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.batching import Batching, explain, scale_recipe, split_batch
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.job import Evaluation, Job
from imagenet_fast.recipe.load import find_file, load_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.run_dir import RunDir, new_folder, split_checkpoint


def plan_job(
    name: str, written: Recipe, ranks: int, *, data: Path | None = None, folder: Path | None = None,
    scale: bool = False, trace: bool = False, init_from: Path | None = None, fresh_head: bool = False,
    resume: bool = False, nodes: range | None = None, overrides: Sequence[str] = (),
) -> Job:  # fmt: skip
    """Build the job that ``ranks`` ranks train, with everything checked that can be checked without torch.

    The options are those of `train`. If nodes may leave and join, ``nodes`` are their allowed numbers, and ``ranks`` is
    that of the largest. ``overrides`` are already set in ``written``: TensorBoard shows their keys.

    Raises:
        UserError: With the first problem found.
    """
    if nodes is not None:
        _check_elastic(written, nodes, ranks // nodes[-1], scale, resume)
    recipe = scale_recipe(written, ranks) if scale else written
    batching = split_batch(recipe, ranks)
    root = find_data(recipe.data, data)
    place = (folder or new_folder(name, recipe.sync.kind)).absolute()
    if fresh_head and init_from is None:
        raise UserError("--fresh-head is for weights to start from; add --init-from FILE, or leave it out")
    start = init_from.absolute() if init_from is not None else None
    note = _note(written, recipe, batching, root, start, fresh_head)
    command, elastic = tuple(sys.argv), nodes is not None
    keys = tuple(dict.fromkeys(override.partition("=")[0].strip() for override in overrides))
    return Job(name, recipe, batching, root, place, note, trace, start, fresh_head, resume, command, elastic, keys)


def on_ranks(job: Job, ranks: int) -> Job:
    """Return ``job`` for ``ranks`` ranks: those of the nodes that are present now, if nodes may leave and join."""
    batching = split_batch(job.recipe, ranks)
    note = _note(job.recipe, job.recipe, batching, job.data, job.init_from, job.fresh_head)
    return replace(job, batching=batching, note=note)


def _check_elastic(written: Recipe, nodes: range, ranks_each: int, scale: bool, resume: bool) -> None:
    """Raise UserError if some number of ``nodes`` cannot train the recipe, or cannot resume the run."""
    asked = f"--nodes {nodes[0]}:{nodes[-1]}"
    if not resume:
        raise UserError(
            f"{asked} needs --resume auto --out DIR, a directory that all nodes share: whoever is there goes on with "
            "what was saved in it"
        )
    if scale:
        raise UserError(
            f"--scale-batch shrinks the batch to the ranks there are, which change with {asked}; leave one out"
        )
    for count in nodes:
        try:
            split_batch(written, count * ranks_each)
        except UserError as error:
            raise UserError(f"{asked} allows {count}: {error}") from None


def _note(
    written: Recipe, recipe: Recipe, batching: Batching, root: Path | None, init_from: Path | None, fresh_head: bool
) -> str:
    note = explain(written, recipe, batching) + left_out(root)
    if init_from is not None:
        note += f"; starts from {init_from}" + (" with a fresh last layer" if fresh_head else "")
    return note


def run_to_resume(asked: str, folder: Path | None) -> Path:
    """Return the run directory that ``--resume`` names; ``auto`` is the one in ``--out``, where no run need exist yet.

    Raises:
        UserError: If there is no such run, or ``--out`` is missing or another directory.
    """
    if asked == "auto":
        if folder is None:
            raise UserError("--resume auto goes on with the run in --out, or begins it there; add --out DIR")
        return folder
    run = Path(asked)
    if folder is not None and folder.absolute() != run.absolute():
        raise UserError(f"--resume {run} goes on in that directory, and --out is {folder}; leave --out out")
    if not RunDir(run).job.is_file():
        raise UserError(f"{run} holds no run to go on with; give the directory of one, or --resume auto --out DIR")
    return run


def plan_evaluation(
    weights: Path, named: str | None, overrides: Sequence[str], ranks: int, *, data: Path | None = None,
    report: Path | None = None,
) -> Evaluation:  # fmt: skip
    """Build the evaluation of ``weights`` by ``ranks`` ranks: by the recipe ``named``, or by that of the weights' run.

    ``data`` is the directory of the images; None for that of the run, or the default. ``report`` is a JSON file for the
    result.

    Raises:
        UserError: With the first problem found, as far as it can be checked without torch.
    """
    name, recipe, run = recipe_of(weights, named, overrides)
    batch = recipe.micro_batch or max(1, recipe.global_batch // recipe.reference_ranks)
    if run is not None:
        batch = run.batching.micro_batch
        if not isinstance(recipe.data, SyntheticData):
            data = data or run.data
    root = find_data(recipe.data, data, check_validation)
    place = report.absolute() if report is not None else None
    return Evaluation(name, recipe, Batching(ranks, batch, 1), weights.absolute(), root, place)


def recipe_of(
    weights: Path, named: str | None, overrides: Sequence[str] = (), sync: str | None = None,
    tell: Callable[[str], object] = warn,
) -> tuple[str, Recipe, Job | None]:  # fmt: skip
    """Return the name of a recipe, the recipe and its job: those of the recipe ``named``, or of the run of ``weights``.

    The job is None if a recipe is named. ``overrides`` and ``sync`` change the recipe, and ``tell`` is called with a
    warning, as in ``load_recipe``.

    Raises:
        UserError: If no recipe is named, and ``weights`` are of no run or its job cannot be read.
    """
    if named is not None:
        path = find_file("recipe", named)
        return path.stem, load_recipe(path, sync, overrides, tell), None
    folder, _ = split_checkpoint(weights)
    run = RunDir(folder)
    if not folder.exists():
        raise UserError(f"there is no run or file {folder}; correct the path")
    if not run.job.is_file():
        if folder.is_dir():
            raise UserError(f"{folder} is a directory without a run; give one that `train` made, or a file of weights")
        raise UserError(f"{weights} does not say by which recipe to use it, as a run directory does; add --recipe NAME")
    job = run.read_job()
    return job.name, load_recipe(run.recipe, sync, overrides, tell) if overrides or sync else job.recipe, job
