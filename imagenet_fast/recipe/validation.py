"""Check what no single key of a recipe tells: how ranks divide over its axes, and values that look like mistakes."""

from __future__ import annotations

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.schema import Recipe


def check_axes(recipe: Recipe, ranks: int) -> None:
    """Raise UserError if ``ranks`` do not divide over the recipe's axes, or the batch not over its micro-batches.

    In the latter case the message names the nearest global batch that a pipeline can split evenly.
    """
    parallel = recipe.parallel
    if ranks % parallel.ranks:
        there = f"there are {ranks}" if ranks > 1 else "there is 1"
        raise UserError(
            f"{parallel.as_written} needs a multiple of {parallel.ranks} ranks, and {there}; choose another --nproc, "
            f"or sizes whose product divides {ranks}"
        )
    of_a_stage = ranks // parallel.pipeline
    pieces = of_a_stage * parallel.micro_batches
    if parallel.pipeline > 1 and recipe.global_batch % pieces:
        nearest = max(1, recipe.global_batch // pieces) * pieces
        raise UserError(
            f"global_batch {recipe.global_batch} does not divide over the {of_a_stage} ranks of a stage in "
            f"{parallel.micro_batches} equal micro-batches each; give --set global_batch={nearest}, or choose another "
            "parallel.micro_batches"
        )


def lint(recipe: Recipe) -> list[str]:
    """Return one sentence for each value that is allowed, but looks like a mistake."""
    doubts: list[str] = []
    target = recipe.target_top1
    if target is not None and target < 1:
        doubts.append(f"target_top1 is {target:g} %; did you mean {100 * target:g}?")
    for key in ("start_lr", "end_lr"):
        rate = getattr(recipe.schedule, key, 0.0)
        if rate > recipe.optim.lr:
            doubts.append(f"schedule.{key} is {rate:g}, above optim.lr ({recipe.optim.lr:g}); lower it, too")
    return doubts
