"""Whether a run may go on by another recipe than it began with."""

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
"""How long it trains, how it is watched, what it is spread over, and whether a bad image ends it. The rate follows
the epochs."""


def digest(recipe: Recipe) -> str:
    """Of all that may not change."""
    fixed = {key: value for key, value in _flat(recipe_tables(recipe)).items() if not _may_change(key)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def differences(begun: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The keys that may not change and have, as ``optim.lr (0.1, now 0.2)``; ``begun``: a recipe's tables, as JSON,
    perhaps of an earlier version, which lacked keys that have their defaults now."""
    with suppress(ValidationError):
        begun = recipe_tables(Recipe.model_validate_json(json.dumps(begun)))
    before, now = _flat(begun), _flat(recipe_tables(recipe))
    keys = [key for key in (before | now) if before.get(key) != now.get(key) and not _may_change(key)]
    return [f"{key} ({json.dumps(before.get(key))}, now {json.dumps(now.get(key))})" for key in keys]


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
