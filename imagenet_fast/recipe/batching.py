"""Split a recipe's global batch over the available ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.optim_config import Sgd
from imagenet_fast.recipe.schema import CifarNet, Recipe, ResNet


@dataclass(frozen=True)
class Batching:
    """The split of a global batch over ranks.

    One optimizer step uses ``global_batch = readers * accumulation * micro_batch`` images.
    """

    ranks: int
    micro_batch: int
    """Images that a rank reads at once.

    All ranks of a pipeline read the same images, and the pipeline splits them further.
    """
    accumulation: int
    """Micro-batches whose gradients are accumulated for one optimizer step."""
    stages: int = 1
    """Ranks in one pipeline; 1 without a pipeline."""

    @property
    def readers(self) -> int:
        """Number of ranks, or of pipelines, that read different images."""
        return self.ranks // self.stages

    @property
    def global_batch(self) -> int:
        """Images per optimizer step."""
        return self.readers * self.accumulation * self.micro_batch


def split_batch(recipe: Recipe, ranks: int) -> Batching:
    """Split the recipe's global batch over ``ranks`` ranks, by accumulating gradients where needed.

    The micro-batch is the recipe's own, or a smaller one that divides each rank's share. A pipeline reads as many
    micro-batches at once as it processes concurrently (``parallel.micro_batches``). Keys of a recipe, and the split::

        global_batch  ranks  micro_batch  pipeline  micro_batches  on ranks   images at once x accumulation x readers
                  64      8            0         1              1         8     8 x 1 x 8
                  64      8            0         1              1         2     8 x 4 x 2
                  64      8            0         1              1        16     4 x 1 x 16
                  64      8            4         1              1         8     4 x 2 x 8
                  60      4            8         1              1         3     5 x 4 x 3
                 100      1           16         1              1         2    10 x 5 x 2
                  64      8            0         2              4         8    16 x 1 x 4
                  64      8            0         2              4         2    16 x 4 x 1
                  64      8            4         2              4         4    16 x 2 x 2
                  64      8            0         1              1         3    72 would have one

    Raises:
        UserError: The ranks do not divide over the recipe's axes, or no split needs at most twice the fewest possible
            accumulation steps. The message names the next global batch that has one. Or as ``check_norms``.
    """
    batch, parallel = recipe.global_batch, recipe.parallel
    if ranks % parallel.ranks:
        there = f"there are {ranks}" if ranks > 1 else "there is 1"
        raise UserError(
            f"{parallel.as_written} needs a multiple of {parallel.ranks} ranks, and {there}; choose another --nproc, "
            f"or sizes whose product divides {ranks}"
        )
    largest = recipe.micro_batch or max(_share(recipe) * parallel.pipeline // parallel.micro_batches, 1)
    if (found := _split(recipe, batch, ranks)) is not None:
        check_norms(recipe, found.micro_batch // parallel.micro_batches)
        return found
    multiple = ranks // parallel.pipeline * parallel.micro_batches
    unit = math.lcm(multiple, 1 if recipe.micro_batch else recipe.reference_ranks)  # other batches have no shares
    above = next(b for b in count((batch // unit + 1) * unit, unit) if _split(recipe, b, ranks))
    raise UserError(
        f"global_batch {batch} does not divide over {ranks} ranks in micro-batches of at most {largest}; "
        f"one that does is --set global_batch={above}, or choose another number of ranks"
    )


def check_norms(recipe: Recipe, micro_batch: int) -> None:
    """Raise UserError if batch norms would see a single value a channel, which has no variance: of one small image."""
    model, size = recipe.model, min(recipe.data.training_sizes)  # the last maps of the smallest image are one pixel
    if micro_batch == 1 and size == model.smallest_image and isinstance(model, ResNet | CifarNet):
        raise UserError(
            f"a micro-batch of 1 image of {size} pixels is too little for the batch norms of {model.label}; "
            "take larger ones, with a global_batch of 2 or more a rank"
        )


def scale_recipe(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe for ``ranks`` ranks: each rank keeps its share of the batch, and learning rates are scaled.

    SGD's rates scale linearly with the batch (Goyal et al., arXiv 1706.02677). LARS's scale with its square root, which
    is closer to what MLPerf's ResNet-50 submissions used between batches of 408 and 3264. A decoupled weight decay and
    the EMA of the weights act once a step, whatever the rate: they are scaled to act as much in an epoch.
    """
    ratio = ranks / recipe.reference_ranks
    factor = math.sqrt(ratio) if recipe.optim.kind == "lars" else ratio
    schedule = recipe.schedule
    rates = {key: factor * getattr(schedule, key) for key in ("start_lr", "end_lr") if hasattr(schedule, key)}
    optim = {"lr": factor * recipe.optim.lr}
    if isinstance(recipe.optim, Sgd) and recipe.optim.decoupled:
        optim["weight_decay"] = ratio * recipe.optim.weight_decay
    scaled: dict[str, object] = {"optim": recipe.optim.model_copy(update=optim), "ema_decay": recipe.ema_decay**ratio}
    scaled |= {"global_batch": _share(recipe) * ranks, "schedule": schedule.model_copy(update=rates)}
    return recipe.model_copy(update={"reference_ranks": ranks, **scaled})


def explain(written: Recipe, recipe: Recipe, batching: Batching) -> str:
    """Describe in one line how the batch of the recipe as ``written`` is split, and what was scaled."""
    parallel = recipe.parallel
    line = (
        f"recipe written for {_count(written.reference_ranks, 'rank')}: {_count(batching.ranks, 'rank')}, micro-batch "
        f"{batching.micro_batch // parallel.micro_batches}, {_count(batching.accumulation, 'accumulation step')}"
    )
    if recipe.global_batch != written.global_batch:
        rule = "square-root" if recipe.optim.kind == "lars" else "linear"
        line += (
            f"; batch {written.global_batch} -> {recipe.global_batch}, "
            f"lr {written.optim.lr:g} -> {recipe.optim.lr:.4g} ({rule} scaling)"
        )
        for key, before, after in (
            ("decoupled weight decay", written.optim.weight_decay, recipe.optim.weight_decay),
            ("ema_decay", written.ema_decay, recipe.ema_decay),
        ):
            line += f", {key} {before:g} -> {after:.4g}" if before != after else ""
    if parallel.ranks > 1:
        line += f"; {parallel.as_written}, data-parallel x {batching.ranks // parallel.ranks}"
    if parallel.pipeline > 1:
        line += f"; {_count(parallel.micro_batches, 'micro-batch', 'es')} under way by {parallel.schedule}"
    return line


def _count(number: int, thing: str, plural: str = "s") -> str:
    """Return a number with its noun, in the plural if the number is greater than 1."""
    return f"{number} {thing}{plural if number > 1 else ''}"


def _share(recipe: Recipe) -> int:
    """Return the images per step of each rank that the recipe was written for, or raise UserError."""
    share, rest = divmod(recipe.global_batch, recipe.reference_ranks)
    if rest:
        raise UserError(
            f"global_batch {recipe.global_batch} does not divide over the recipe's {recipe.reference_ranks} ranks; one "
            f"that does is --set global_batch={recipe.global_batch - rest + recipe.reference_ranks}"
            + ("" if recipe.micro_batch else ", or set micro_batch")
        )
    return share


def _split(recipe: Recipe, batch: int, ranks: int) -> Batching | None:
    """Return the split of ``batch`` with the fewest accumulation steps.

    The images that a rank reads at once are a multiple of those under way in a pipeline. Without ``micro_batch`` they
    are at most the share of a rank that the recipe was written for.

    Returns:
        None if it needs over twice the fewest steps possible, or the recipe's own ranks have no share of the batch.
    """
    if not recipe.micro_batch and batch % recipe.reference_ranks:
        return None
    stages, multiple = recipe.parallel.pipeline, recipe.parallel.micro_batches
    largest = recipe.micro_batch * multiple or max(batch // recipe.reference_ranks * stages, multiple)
    share, rest = divmod(batch, ranks // stages)
    if rest or not share:
        return None
    fewest = math.ceil(share / largest)
    steps = next((a for a in range(fewest, min(2 * fewest, share) + 1) if share % (a * multiple) == 0), None)
    return Batching(ranks, share // steps, steps, stages) if steps else None
