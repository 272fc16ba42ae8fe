"""The shipped recipes as a table."""

from __future__ import annotations

from rich.table import Table

from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.recipe.load import load_recipe, recipe_folder, recipe_names
from imagenet_fast.recipe.schema import Recipe


def recipe_table() -> Table:
    """Return a table with one row per recipe: model, optimiser, engine, axes, ranks, batch, epochs and target accuracy.

    Axes: ``tp4`` is four shards, ``pp4`` four stages, ``dp`` data parallelism alone.
    """
    recipes = {name: load_recipe(recipe_folder() / f"{name}.toml") for name in recipe_names()}
    return compact_table(
        ("recipe", "model", "optim", "engine", "axes"),
        ("ranks", "batch", "epochs", "target"),
        (_row(name, recipe) for name, recipe in recipes.items()),
    )


def _row(name: str, recipe: Recipe) -> tuple[str, ...]:
    target = f"{recipe.target_top1:g} %" if recipe.target_top1 is not None else "–"
    numbers = (str(recipe.ranks), str(recipe.global_batch), str(recipe.epochs))
    axes = recipe.parallel.layout(recipe.parallel.ranks) if recipe.parallel.ranks > 1 else "dp"
    return name, recipe.model.kind, recipe.optim.kind, recipe.sync.kind, axes, *numbers, target
