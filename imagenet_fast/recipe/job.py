"""Jobs: what ranks are given to do, with every setting that they need, fixed once.

The command line is parsed in one place. Every rank then does what the job says, which it reads from a JSON file.
A run may resume with a recipe that differs from the one it began with, in some keys.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe

MAY_CHANGE = (
    "reference_ranks", "micro_batch", "epochs", "target_top1", "target_mirrored", "eval_every", "first_eval",
    "eval_mirror", "eval_shift", "log_every", "nonfinite_steps", "data.workers", "data.prefetch", "data.dali",
    "data.on_bad_image", "parallel", "checkpoint", "timeout", "numa_binding", "graph", "model.fused_norm",
    "data.resident",
)  # fmt: skip
"""Keys, or tables of keys, that may change when a run resumes.

They decide how long the run trains, how it is monitored, computed and spread over ranks, and whether a bad image ends
it. The learning rate follows ``epochs``.
"""


@dataclass(frozen=True)
class Job:
    """A training run: the recipe, and the directories and options of the run."""

    task: ClassVar = "train"
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
    overrides: tuple[str, ...] = ()
    """Keys of the recipe, or tables of keys, that the user has set, here or when the run began."""

    @property
    def resuming(self) -> str:
        """The command that resumes the run, in words. It may have begun without an ``--out``, or by ``compare``."""
        if self.resume:
            return "the same command"
        folder = self.folder
        with suppress(OSError, ValueError):  # ValueError: not below the working directory, which may be gone
            folder = folder.relative_to(Path.cwd())
        return f"the same train command with --resume {shlex.quote(str(folder))}"

    def going_on(self, saved: int) -> str:
        """Return from where that command resumes if step ``saved`` is the last that is saved; 0: none is."""
        then = f"goes on from step {saved}" if saved else "begins again, as no checkpoint was written"
        return f"{self.resuming} {then}"

    def agreed(self) -> dict[str, Any]:
        """Return the settings that must be equal on all nodes.

        Directories are left out: each node may keep data and runs elsewhere.
        """
        agreed = {"recipe": self.name, **recipe_tables(self.recipe), "all ranks": self.batching.ranks}
        agreed |= {"--init-from": self.init_from.name, "--fresh-head": self.fresh_head} if self.init_from else {}
        return agreed | ({"--resume": True} if self.resume else {})


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of given weights.

    Only the model, the images and the precision of the recipe are used.
    """

    task: ClassVar = "eval"
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
        """Return the settings that must be equal on all nodes, without directories."""
        ranks = {"all ranks": self.batching.ranks, "micro-batch": self.batching.micro_batch}
        return {"recipe": self.name, **recipe_tables(self.recipe), **ranks, "--weights": self.weights.name}


@dataclass(frozen=True)
class DoctorJob:
    """A check of the nodes that are to train."""

    task: ClassVar = "doctor"
    data: Path | None
    """The image directory; None: no images are looked at."""
    out: Path
    """The directory of runs."""


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


def differences(begun: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """List the keys that differ but may not change, each as ``optim.lr (0.1, now 0.2)``.

    Args:
        begun: The tables of the recipe that the run began with, as JSON.
        recipe: The recipe to resume with.
    """
    before, now = flat_tables(begun), flat_tables(recipe_tables(recipe))
    free = tuple(f"{key}." for key in MAY_CHANGE)
    keys = [key for key in before | now if before.get(key) != now.get(key) and not f"{key}.".startswith(free)]
    return [f"{key} ({json.dumps(before.get(key))}, now {json.dumps(now.get(key))})" for key in keys]


def flat_tables(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flat_tables(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
