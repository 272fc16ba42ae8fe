"""Check whether a run may resume with a recipe that differs from the one it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from imagenet_fast.recipe.job import recipe_tables
from imagenet_fast.recipe.schema import Recipe

MAY_CHANGE = (
    "ranks", "micro_batch", "epochs", "target_top1", "eval_every", "first_eval", "log_every", "nonfinite_steps",
    "data.workers", "data.prefetch", "data.dali", "data.on_bad_image", "data.cache", "parallel", "checkpoint",
    "timeout", "numa_binding",
)  # fmt: skip
"""Keys, or tables of keys, that may change when a run resumes.

They decide how long the run trains, how it is monitored, how it is spread over ranks, and whether a bad image ends it.
The learning rate follows ``epochs``.
"""


def digest(recipe: Recipe) -> str:
    """Return a digest, 16 hex digits, of all recipe values that may not change when a run resumes."""
    fixed = {key: value for key, value in _flat(recipe_tables(recipe)).items() if not _may_change(key)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def differences(begun: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """List the keys that differ but may not change, each as ``optim.lr (0.1, now 0.2)``.

    Args:
        begun: The tables of the recipe that the run began with, as JSON. They may come from an earlier version, which
            lacked keys that have defaults now.
        recipe: The recipe to resume with.
    """
    with suppress(ValidationError):
        begun = recipe_tables(Recipe.model_validate_json(json.dumps(begun)))
    before, now = _flat(begun), _flat(recipe_tables(recipe))
    keys = [key for key in (before | now) if before.get(key) != now.get(key) and not _may_change(key)]
    return [f"{key} ({json.dumps(before.get(key))}, now {json.dumps(now.get(key))})" for key in keys]


def _may_change(key: str) -> bool:
    """Return whether ``key``, or a table that holds it, is in ``MAY_CHANGE``."""
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
