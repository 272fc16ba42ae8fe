"""One training run, settled once: the command line is read in one place, and every rank trains what is written here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.schema import Recipe


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
    init_from: Path | None = None
    """A file of weights, or a run directory, to start from. Rank 0 reads it."""
    fresh_head: bool = False
    """Whether the last layer starts anew all the same."""
    resume: bool = False
    """Whether to go on from the last checkpoint in ``folder``, if there is one."""
    command: tuple[str, ...] = ()
    """How it was asked for."""
    elastic: bool = False
    """Whether nodes may leave and join: the ranks there are, and with them ``batching``, change then."""

    def agreed(self) -> dict[str, Any]:
        """What all nodes must have alike. Folders are not among it: each may keep data and runs where it likes."""
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
        """Write it as JSON, in one move, so that a reader never sees half of it."""
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
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps(table, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)


def read_job(path: Path) -> Job:
    """What :meth:`Job.write` wrote, also before jobs could start from weights."""
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
    """A recipe as JSON has it, without infinities."""
    tables: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_none=True))
    return tables
