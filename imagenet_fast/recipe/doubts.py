"""Find recipe values that are allowed, but probably not intended."""

from __future__ import annotations

from imagenet_fast.recipe.schema import Recipe


def lint(recipe: Recipe) -> list[str]:
    """Return one sentence for each value that is allowed, but looks like a mistake."""
    target = recipe.target_top1
    if target is not None and target < 1:
        return [f"target_top1 is {target:g} %; did you mean {100 * target:g}?"]
    return []
