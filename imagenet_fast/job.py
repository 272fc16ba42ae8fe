"""One training run as the command line asked for it, checked before anything is started."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagenet_fast.batching import Batching, explain, scale_recipe, split_batch
from imagenet_fast.data.imagefolder import check_folders
from imagenet_fast.data.places import locate
from imagenet_fast.errors import UserError
from imagenet_fast.recipe import Recipe, SyntheticData


@dataclass(frozen=True)
class Job:
    """What every rank trains, and where rank 0 writes about it."""

    name: str
    recipe: Recipe
    batching: Batching
    data: Path | None
    folder: Path
    note: str = ""
    """What became of the recipe's batch."""
    trace: bool = False
    """Whether to write a timeline of a few steps."""


def plan_job(
    name: str, written: Recipe, data: Path | None, folder: Path, ranks: int, scale: bool, trace: bool = False
) -> Job:
    """Check everything that can be checked without torch. Raises UserError with the first thing wrong."""
    recipe = scale_recipe(written, ranks) if scale else written
    batching = split_batch(recipe, ranks)
    root = None
    if not isinstance(recipe.data, SyntheticData):
        root = locate(recipe.data.dataset, data)
        check_folders(root)
    return Job(name, recipe, batching, root, folder, explain(written, recipe, batching), trace)


def check_writable(folder: Path) -> None:
    """Raise UserError where a run cannot be put into ``folder``."""
    try:
        if (folder / "events.jsonl").exists():
            raise UserError(f"{folder} already holds a run; give another --out, or remove it")
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        tempfile.TemporaryFile(dir=nearest).close()  # root may write almost anywhere, but not everywhere it is told
    except OSError as error:
        raise UserError(
            f"the run cannot be written to {folder} ({error.strerror}: {error.filename}); give another --out"
        ) from None
