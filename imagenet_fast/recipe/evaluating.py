"""One evaluation of given weights: every setting that all ranks need, fixed once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import recipe_tables
from imagenet_fast.recipe.schema import Recipe


@dataclass(frozen=True)
class Evaluation:
    """The settings of one evaluation.

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

    def write(self, path: Path) -> None:
        """Write the settings to ``path`` as JSON."""
        table = {
            "name": self.name,
            "recipe": recipe_tables(self.recipe),
            "batching": vars(self.batching),
            "weights": str(self.weights),
            "data": str(self.data) if self.data is not None else None,
            "report": str(self.report) if self.report is not None else None,
        }
        path.write_text(json.dumps(table, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_evaluation(path: Path) -> Evaluation:
    """Read what ``Evaluation.write`` wrote."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return Evaluation(
        table["name"],
        Recipe.model_validate_json(json.dumps(table["recipe"])),
        Batching(**table["batching"]),
        Path(table["weights"]),
        Path(table["data"]) if table["data"] is not None else None,
        Path(table["report"]) if table["report"] is not None else None,
    )
