"""How a recipe's global batch is split over the ranks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count

from imagenet_fast.errors import UserError
from imagenet_fast.recipe import Recipe


@dataclass(frozen=True)
class Batching:
    """One optimiser step sees ``global_batch = ranks * accumulation * micro_batch`` images."""

    ranks: int
    micro_batch: int
    accumulation: int
    lr_factor: float = 1.0

    @property
    def global_batch(self) -> int:
        return self.ranks * self.accumulation * self.micro_batch


def split_batch(recipe: Recipe, ranks: int) -> Batching:
    """Keep the recipe's global batch on ``ranks`` ranks by accumulating gradients.

    The micro-batch is the recipe's own, or a smaller one that divides. Raises UserError with the nearest
    global batches where there is none worth having.
    """
    return _split_or_refuse(recipe.global_batch, ranks, recipe.micro_batch or _share(recipe))


def scale_batch(recipe: Recipe, ranks: int) -> Batching:
    """Give each of ``ranks`` ranks the share that the recipe's own ranks have, and scale the learning rate.

    SGD's rate follows the batch linearly (Goyal et al., arXiv 1706.02677), LARS's its square root, which is
    closer to what MLPerf's ResNet-50 submissions used between batches of 408 and 3264.
    """
    share = _share(recipe)
    ratio = ranks / recipe.ranks
    factor = math.sqrt(ratio) if recipe.optim.kind == "lars" else ratio
    return replace(_split_or_refuse(share * ranks, ranks, recipe.micro_batch or share), lr_factor=factor)


def explain(recipe: Recipe, batching: Batching) -> str:
    """What became of the recipe's batch, in one line."""
    steps = f"{batching.accumulation} accumulation step{'s' if batching.accumulation > 1 else ''}"
    ranks = f"{batching.ranks} rank{'s' if batching.ranks > 1 else ''}"
    line = f"recipe written for {recipe.ranks} ranks: {ranks}, micro-batch {batching.micro_batch}, {steps}"
    if batching.global_batch != recipe.global_batch:
        rule = "square-root" if recipe.optim.kind == "lars" else "linear"
        line += (
            f"; batch {recipe.global_batch} -> {batching.global_batch}, "
            f"lr {recipe.optim.lr:g} -> {recipe.optim.lr * batching.lr_factor:.4g} ({rule} scaling)"
        )
    return line


def _share(recipe: Recipe) -> int:
    """Images a step on each of the ranks the recipe was written for."""
    share, rest = divmod(recipe.global_batch, recipe.ranks)
    if rest:
        below = recipe.global_batch - rest
        raise UserError(
            f"global_batch {recipe.global_batch} does not divide over the recipe's {recipe.ranks} ranks; "
            f"the nearest that do are {below} and {below + recipe.ranks}: "
            f"--set global_batch={below + recipe.ranks}, or set micro_batch"
        )
    return share


def _split_or_refuse(batch: int, ranks: int, micro: int) -> Batching:
    if (found := _split(batch, ranks, micro)) is not None:
        return found
    below = next((b for b in range(batch - 1, 0, -1) if _split(b, ranks, micro)), None)
    above = next(b for b in count(batch + 1) if _split(b, ranks, micro))
    near = f"is {above}" if below is None else f"are {below} and {above}"
    raise UserError(
        f"global_batch {batch} does not divide over {ranks} ranks in micro-batches of at most {micro}; "
        f"the nearest that do {near}: --set global_batch={above}, or choose another --nproc"
    )


def _split(batch: int, ranks: int, micro: int) -> Batching | None:
    """The split with the fewest accumulation steps, if it needs at most twice as many as a perfect one."""
    share, rest = divmod(batch, ranks)
    if rest or not share:
        return None
    fewest = math.ceil(share / micro)
    steps = next((a for a in range(fewest, min(2 * fewest, share) + 1) if share % a == 0), None)
    return Batching(ranks, share // steps, steps) if steps else None
