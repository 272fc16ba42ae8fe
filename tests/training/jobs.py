"""A job for ranks that are here already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tests
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from tests.conftest import tables

SMALL_NETWORK = {"kind": "cifarnet", "widths": [4, 5, 6]}


def job_of(folder: Path = Path("unused"), images: Path | None = None, resume: bool = False, **changes: Any) -> Job:
    """For the ranks that are here; with a small network unless ``changes`` of the recipe name another."""
    recipe = parse_recipe("test", tables(**({"model": SMALL_NETWORK} | changes)))
    return Job("test", recipe, split_batch(recipe, tests.world().size), images, folder, resume=resume)
