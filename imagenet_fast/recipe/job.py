"""Jobs: what ranks are given to do, with every setting that they need, fixed once.

The command line is parsed in one place. Every rank then does what the job says, which it reads from a JSON file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe, Timeout


@dataclass(frozen=True)
class Job:
    """A training run: the recipe, and the directories and options of the run."""

    name: str
    """The recipe's name."""
    recipe: Recipe
    batching: Batching
    data: Path | None
    """The image directory; None for synthetic images."""
    folder: Path
    """The run directory."""
    note: str = ""
    """One line on how the recipe's batch is split, for the log."""
    trace: bool = False
    """Whether to write a timeline of a few steps."""
    init_from: Path | None = None
    """A weights file, a run directory or one of its checkpoints to start from. Rank 0 reads it."""
    fresh_head: bool = False
    """Whether the last layer is initialised anew, in spite of ``init_from``."""
    resume: bool = False
    """Whether to resume from the last checkpoint in ``folder``, if there is one."""
    command: tuple[str, ...] = ()
    """The command line that started the run."""
    elastic: bool = False
    """Whether nodes may leave and join; the number of ranks, and ``batching``, then change."""

    def agreed(self) -> dict[str, Any]:
        """Return the settings that must be equal on all nodes.

        Directories are left out: each node may keep data and runs elsewhere.
        """
        starts = {"--init-from": self.init_from.name, "--fresh-head": self.fresh_head} if self.init_from else {}
        goes_on = {"--resume": True} if self.resume else {}
        return {
            "recipe": self.name,
            **recipe_tables(self.recipe),
            "all ranks": self.batching.ranks,
            **starts,
            **goes_on,
        }


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of given weights.

    Only the model, the images and the precision of the recipe are used.
    """

    name: str
    """The recipe's name."""
    recipe: Recipe
    batching: Batching
    weights: Path
    """A weights file, a run directory, or one checkpoint of a run (RUN@WHICH). Rank 0 reads it."""
    data: Path | None
    """The image directory; None for synthetic images."""
    report: Path | None = None
    """The file to which rank 0 writes the result as JSON; None: no file."""

    def agreed(self) -> dict[str, Any]:
        """Return the settings that must be equal on all nodes.

        Directories are left out: each node may keep data elsewhere.
        """
        ranks = {"all ranks": self.batching.ranks, "micro-batch": self.batching.micro_batch}
        return {"recipe": self.name, **recipe_tables(self.recipe), **ranks, "--weights": self.weights.name}


@dataclass(frozen=True)
class DoctorJob:
    """A check of the nodes that are to train."""

    data: Path | None
    """The image directory; None: no images are looked at."""
    out: Path
    """The directory of runs."""
    timeout: Timeout


AnyJob = Job | Evaluation | DoctorJob
J = TypeVar("J", Job, Evaluation, DoctorJob)


def write_job(job: AnyJob, path: Path) -> None:
    """Write ``job`` to ``path`` as JSON, atomically, so that a reader never sees half of it."""
    table = TypeAdapter(type(job)).dump_python(job, mode="json")
    if not isinstance(job, DoctorJob):
        table["recipe"] = recipe_tables(job.recipe)
    atomic_write_text(path, json.dumps(table, indent=2, allow_nan=False) + "\n")


def read_job(path: Path, kind: type[J]) -> J:
    """Read a job of type ``kind`` that ``write_job`` wrote.

    Fields that a file of an earlier version lacks have their defaults.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or of another kind.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(table, dict) and "recipe" in table:
        table["recipe"] = Recipe.model_validate_json(json.dumps(table["recipe"]))  # lists are tuples in JSON only
    job: J = TypeAdapter(kind).validate_python(table)
    return job


def recipe_tables(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON tables, without infinities, which JSON lacks, and without None."""
    tables: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_none=True))
    return tables
