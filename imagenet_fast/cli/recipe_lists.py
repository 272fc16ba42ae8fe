"""What `imagenet-fast recipes` and `recipes keys` print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.recipe.key_reference import Key
from imagenet_fast.recipe.load import load_recipe, shipped


def recipe_table() -> Table:
    """Return a table of the recipes: model, optimizer, engine, ranks, batch, epochs and target accuracy.

    Before the ranks stands their layout: ``tp4`` is four shards, ``pp4`` four stages, ``dp`` data parallelism alone.
    """
    recipes = {name: load_recipe(path) for name, path in shipped("recipe").items()}
    rows = []
    for name, recipe in recipes.items():
        layout = recipe.parallel.layout(recipe.parallel.ranks) if recipe.parallel.ranks > 1 else "dp"
        numbers = (f"{layout} {recipe.ranks}", str(recipe.global_batch), str(recipe.epochs))
        target = number(recipe.target_top1, "g", " %")
        rows.append((name, recipe.model.label, recipe.optim.kind, recipe.sync.kind, *numbers, target))
    return compact_table(("recipe", "model", "optim", "engine"), ("ranks", "batch", "epochs", "target"), rows)


def key_list(keys: Iterable[Key]) -> Group:
    """Return the keys one below the other: name, type and default in a line, and what it means below it."""
    pieces: list[Text | Padding] = []
    for key in keys:
        kinds = f"  ({', '.join(key.kinds)})" if key.kinds else ""
        default = key.default if key.default in ("required", "absent", "derived") else f"default {key.default}"
        pieces.append(Text.assemble((key.name, "bold"), f"  {key.type}; {default}", (kinds, "dim")))
        pieces.append(Padding(Text(key.meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
    return Group(*pieces)
