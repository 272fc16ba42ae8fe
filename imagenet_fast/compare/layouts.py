"""Parse layouts of the ranks from an option: ``dp4``, ``tp4``, ``pp2dp2``.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from imagenet_fast.errors import UserError, listed, warn
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import load_recipe
from imagenet_fast.recipe.parallel_config import misfit
from imagenet_fast.recipe.schema import Recipe

MICRO_BATCHES = 4
"""Minimum number of micro-batches of a pipeline, unless the recipe or an override sets their number."""


@dataclass(frozen=True)
class NamedLayout:
    """A layout: sizes of the pipeline, data and tensor axes. ``name`` is ignored in comparisons."""

    name: str = field(compare=False)
    pipeline: int
    data: int
    tensor: int


def parse_layouts(text: str, ranks: int) -> list[NamedLayout]:
    """Parse the layouts in ``--layout``: ``ppN``, ``dpN`` and ``tpN`` in any order; an axis left out is 1.

    Raises:
        UserError: A layout is malformed, does not have ``ranks`` ranks, or occurs twice.
    """
    return listed("--layout", text, lambda name: _parse(text, name, ranks))


def laid_out(
    path: Path, engine: str, overrides: Sequence[str], layout: NamedLayout, ranks: int,
    tell: Callable[[str], object] = warn,
) -> Recipe:  # fmt: skip
    """Return the recipe with ``layout``, and with micro-batches if it has a pipeline.

    Args:
        path: Path of the recipe.
        engine: Name of the engine.
        overrides: Other overrides; those of ``parallel`` are dropped if the layout has no pipeline.
        layout: The layout.
        ranks: Number of ranks.
        tell: Called with a warning, as in ``load_recipe``.

    Raises:
        UserError: The recipe or engine does not work with the layout.
    """
    others = [override for override in overrides if not _is_parallel(override)]
    load = partial(load_recipe, path, engine, tell=lambda _: None)
    load_recipe(path, engine, [*others, "parallel={}"], tell)  # raises errors that are not due to the layout
    try:
        if layout.pipeline == 1:
            settled = [*others, f"parallel={{tensor={layout.tensor}}}"]
        else:
            settled = [*overrides, f"parallel.tensor={layout.tensor}", f"parallel.pipeline={layout.pipeline}"]
            trial = load([*settled, "parallel.schedule=gpipe"])  # takes any number of them
            if "micro_batches" not in trial.parallel.model_fields_set:
                settled.append(f"parallel.micro_batches={_micro_batches(trial, ranks)}")
        recipe = load(settled)
        split_batch(recipe, ranks)
    except UserError as error:
        raise UserError(f"--layout {layout.name} with {engine}: {error}") from None
    return recipe


def refuse_axes(overrides: Sequence[str], layouts: Sequence[NamedLayout]) -> None:
    """Raise UserError if an override sets what ``--layout`` sets, or is for pipelines and no layout has one."""
    for override in filter(_is_parallel, overrides):
        if _key(override) in ("parallel", "parallel.tensor", "parallel.pipeline"):
            raise UserError(
                f"--set {override} conflicts with --layout, which sets it for each run; leave one of them out"
            )
        if all(layout.pipeline == 1 for layout in layouts):
            names = ",".join(layout.name for layout in layouts)
            raise UserError(f"--set {override} is for pipelines, and --layout {names} has none; leave it out")


def _parse(text: str, name: str, ranks: int) -> NamedLayout:
    """Parse one layout ``name`` of the option's ``text``."""
    parts = re.findall(r"(pp|dp|tp)([1-9][0-9]{0,5})", name, re.ASCII)
    sizes = {axis: int(size) for axis, size in parts}
    if not parts or "".join(axis + size for axis, size in parts) != name or len(sizes) < len(parts):
        raise UserError(
            f"--layout {text}: {name!r} is not made of ppN, dpN and tpN, each once at most; write for example "
            "dp4,tp4,pp2dp2"
        )
    layout = NamedLayout(name, sizes.get("pp", 1), sizes.get("dp", 1), sizes.get("tp", 1))
    product = layout.pipeline * layout.data * layout.tensor
    if product != ranks:
        whole = f"{name}dp{ranks // product}" if "dp" not in sizes and ranks % product == 0 else f"dp{ranks}"
        raise UserError(
            f"--layout {text}: {name} is of {product} rank{'s' if product > 1 else ''}, and there "
            f"{f'are {ranks}' if ranks > 1 else 'is 1'}; write for example {whole}, or give --nproc {product}"
        )
    return layout


def _micro_batches(recipe: Recipe, ranks: int) -> int:
    """Return the smallest number of micro-batches that divides a stage's images and suits every schedule.

    It is at least four, and at least the number of stages. If there is none, return that minimum: the later check
    refuses it with a batch that divides.
    """
    stages = recipe.parallel.pipeline
    images = recipe.global_batch // (ranks // stages)
    least = max(MICRO_BATCHES, stages)
    even = (n for n in range(least, images + 1) if images % n == 0 and misfit("interleaved", stages, n) is None)
    return next(even, least)


def _is_parallel(override: str) -> bool:
    return _key(override).partition(".")[0] == "parallel"


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
