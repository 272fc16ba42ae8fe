"""From which weights a run starts, or which an evaluation judges: read once, by rank 0."""

from __future__ import annotations

from pathlib import Path

from imagenet_fast.errors import UserError
from imagenet_fast.models.weights import Weights, fit, read_weights
from imagenet_fast.ranks.agreement import refused_by_first
from imagenet_fast.ranks.world import World
from imagenet_fast.recipe.schema import Model
from imagenet_fast.record.past_runs import weights_file


def starting_weights(given: Path, model: Model, classes: int, world: World, fresh_head: bool = False) -> Weights | None:
    """On rank 0 the weights that ``given`` (a file, or a run directory) stands for, fit for ``model``.

    Elsewhere None: other ranks get theirs from rank 0 (:func:`initial_model`), and their nodes need no such file.

    Raises UserError, the same on every rank, where rank 0 cannot read them or they do not fit.
    """
    found, refusal = None, ""
    if world.leads:
        try:
            found = fit(read_weights(weights_file(given)), model, classes, fresh_head)
        except UserError as error:
            refusal = str(error)
    if refusal := refused_by_first(refusal, world.device):
        raise UserError(refusal)
    return found
