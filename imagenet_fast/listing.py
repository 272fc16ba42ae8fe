"""The shipped recipes as a table."""

from __future__ import annotations

from rich.table import Column, Table

from imagenet_fast.loading import load_recipe, recipe_folder, recipe_names


def recipe_table() -> Table:
    """One row a recipe: what it trains, on how many ranks, how, and to which accuracy. Fits 80 columns."""
    text = ("recipe", "model", "optimiser", "engine")
    names = ("recipe", "model", "ranks", "batch", "epochs", "optimiser", "engine", "target")
    columns = [Column(name, justify="left" if name in text else "right", no_wrap=True) for name in names]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for name in recipe_names():
        recipe = load_recipe(recipe_folder() / f"{name}.toml")
        target = f"{recipe.target_top1:g} %" if recipe.target_top1 is not None else "–"
        numbers = (str(recipe.ranks), str(recipe.global_batch), str(recipe.epochs))
        table.add_row(name, recipe.model.kind, *numbers, recipe.optim.kind, recipe.sync.kind, target)
    return table
