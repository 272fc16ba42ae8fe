"""One training run: all settings that ranks need, fixed once.

The command line is parsed in one place, and every rank trains what is recorded here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe


@dataclass(frozen=True)
class Job:
    """The recipe that every rank trains, with the directories and options of one run."""

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

    def write(self, path: Path) -> None:
        """Write the job to ``path`` as JSON, atomically, so that a reader never sees half of it."""
        table = {
            "name": self.name,
            "recipe": recipe_tables(self.recipe),
            "batching": vars(self.batching),
            "data": str(self.data) if self.data is not None else None,
            "folder": str(self.folder),
            "note": self.note,
            "trace": self.trace,
            "init_from": str(self.init_from) if self.init_from is not None else None,
            "fresh_head": self.fresh_head,
            "resume": self.resume,
            "command": self.command,
            "elastic": self.elastic,
        }
        atomic_write_text(path, json.dumps(table, indent=2, allow_nan=False) + "\n")


def read_job(path: Path) -> Job:
    """Read what ``Job.write`` wrote.

    Files of earlier versions, which lack some of the fields, are accepted: missing fields have their defaults.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    init_from = table.get("init_from")
    return Job(
        table["name"],
        Recipe.model_validate_json(json.dumps(table["recipe"])),
        Batching(**table["batching"]),
        Path(table["data"]) if table["data"] is not None else None,
        Path(table["folder"]),
        table["note"],
        table["trace"],
        Path(init_from) if init_from is not None else None,
        table.get("fresh_head", False),
        table.get("resume", False),
        tuple(table["command"]),
        table.get("elastic", False),
    )


def recipe_tables(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON tables, without infinities, which JSON lacks, and without None."""
    tables: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_none=True))
    return tables
