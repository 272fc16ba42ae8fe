"""From a recipe and the command line to a job, checked before anything is started."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from imagenet_fast.data.imagefolder import check_folders
from imagenet_fast.data.places import locate
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.axes import check_axes
from imagenet_fast.recipe.batching import explain, scale_recipe, split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.schema import Recipe, SyntheticData


def plan_job(
    name: str,
    written: Recipe,
    ranks: int,
    *,
    data: Path | None = None,
    folder: Path | None = None,
    scale: bool = False,
    trace: bool = False,
) -> Job:
    """Settle what ``ranks`` ranks train, from which folder into which; None for the usual ones.

    Checks everything that can be checked without torch. Raises UserError with the first thing wrong.
    """
    recipe = scale_recipe(written, ranks) if scale else written
    check_axes(recipe, ranks)
    batching = split_batch(recipe, ranks)
    root = None
    if isinstance(recipe.data, SyntheticData):
        if data is not None:
            raise UserError(
                f"--data {data} would not be read: data.loader is 'synthetic', which makes its own pictures; "
                "leave --data out, or choose a recipe with another loader"
            )
    else:
        root = locate(recipe.data.dataset, data).absolute()
        check_folders(root)
    place = (folder or new_folder(name, recipe.sync.kind)).absolute()
    return Job(name, recipe, batching, root, place, explain(written, recipe, batching), trace, tuple(sys.argv))


def new_folder(recipe: str, what: str) -> Path:
    """Where a run goes that was given no directory."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{what}"


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
