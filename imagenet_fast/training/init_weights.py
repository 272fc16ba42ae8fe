"""From which weights a run starts, or which an evaluation judges: read once, by rank 0."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from imagenet_fast.checkpoint import Checkpoint, best, newest, open_checkpoint
from imagenet_fast.checkpoint.manifest import Manifest
from imagenet_fast.checkpoint.retention import survey
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import broadcast_error
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.report import FINAL_WEIGHTS, is_checkpoint, split_checkpoint, weights_file
from imagenet_fast.models.weights import Weights, fit, read_weights
from imagenet_fast.recipe.schema import Model


def load_initial_weights(
    given: Path, model: Model, classes: int, world: DistContext, fresh_head: bool = False
) -> Weights | None:
    """On rank 0 the weights that ``given`` stands for (see :func:`given_weights`), fit for ``model``.

    Elsewhere None: other ranks get theirs from rank 0 (:func:`build_initial_model`), and their nodes need no such file.

    Raises UserError, the same on every rank, where rank 0 cannot read them or they do not fit.
    """
    found, refusal = None, ""
    if world.is_main:
        try:
            found = fit(given_weights(given), model, classes, fresh_head)
        except UserError as error:
            refusal = str(error)
    if refusal := broadcast_error(refusal, world.device):
        raise UserError(refusal)
    return found


def given_weights(given: Path) -> Weights:
    """The weights that ``given`` stands for.

    A file; a run directory, which stands for its final weights; one of its checkpoints as ``RUN@best``, ``RUN@newest``
    (or ``latest``), ``RUN@final``, ``RUN@step-1200``; or the directory of a checkpoint. Raises UserError where there
    are none, with those that exist.
    """
    folder, which = split_checkpoint(given)
    if which is not None and which != "final":
        return _saved_weights(chosen_checkpoint(folder, which))
    if which is None and is_checkpoint(folder):
        return _saved_weights(open_checkpoint(folder))
    return read_weights(weights_file(folder))


def chosen_checkpoint(run: Path, which: str) -> Checkpoint:
    """That which ``RUN@WHICH`` names. Raises UserError where there is none, with those that exist."""
    root = run / "checkpoints"
    try:
        found, _ = survey(root)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); see to that, or give another") from None
    match which:
        case "best":
            chosen = best(root)
        case "newest" | "latest":
            chosen = newest(root)
        case _:
            named = which.removeprefix("step-")
            same = [
                f for f, about in found.items() if f.name == which or (named.isdecimal() and about.step == int(named))
            ]
            chosen = Checkpoint(same[0], found[same[0]]) if same else None  # the newest of them comes first
    if chosen is None:
        raise UserError(f"{run} has no checkpoint '{which}'{_instead(run, found, which)}")
    return chosen


def _instead(run: Path, found: dict[Path, Manifest], which: str) -> str:
    """What to give in place of ``which``, to end a sentence."""
    final = (run / FINAL_WEIGHTS).is_file()
    if not found:
        return "; it holds none" + (", but final weights: leave the @ out" if final else "; give another run")
    evaluated = any(manifest.top1 is not None for manifest in found.values())
    why = ": none of its checkpoints was evaluated" if which == "best" else ""
    steps = [f"step-{step}" for step in sorted({manifest.step for manifest in found.values()})]
    names = [*["best"] * evaluated, "newest", *["final"] * final, *steps]
    return f"{why}; there are {', '.join(names)}"


def _saved_weights(checkpoint: Checkpoint) -> Weights:
    """What an evaluation at that moment would have judged: the moving average where there is one, with the mean of all
    ranks' statistics."""
    folder = checkpoint.folder
    try:
        shared = checkpoint.shared()
        averaged = shared["average"] is not None
        tensors = dict(shared["average" if averaged else "model"])
        kind = "average" if averaged else "buffers"
        of_ranks: dict[str, list[Tensor]] = {}
        for _, own in checkpoint.parts():
            for name, tensor in own[kind].items():
                of_ranks.setdefault(name, []).append(tensor)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is a checkpoint of another version, or not of a training; give another") from None
    tensors |= {name: _mean(values) for name, values in of_ranks.items() if name in tensors}
    return Weights(str(folder), tensors)


def _mean(values: list[Tensor]) -> Tensor:
    """Of whole numbers, such as counts of batches, the largest. Equal ones stay what they are to the bit."""
    first, *others = values
    if all(torch.equal(first, other) for other in others):
        return first
    stacked = torch.stack(values)
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)
