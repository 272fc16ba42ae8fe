"""Find the first layer with non-finite values when a run has to end for them, and say so in one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist
from torch import nn

from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import broadcast_error
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.nonfinite import is_finite, must_be_finite, trace_nonfinite
from imagenet_fast.training.train_step import TrainingStep

Location = Literal["images", "weights", "layer", "loss", "elsewhere"]
"""Place of the first non-finite values.

They follow the data flow: the images read, the weights, what a layer makes of finite values, the loss of a finite
output. ``elsewhere``: this rank's part of the network shows nothing.
"""


@dataclass(frozen=True)
class Diagnosis:
    """Result of one rank's search."""

    streak: int
    """Consecutive steps whose loss was not finite."""
    place: Location
    what: str
    """Part of the error message about this rank."""


def examine(take_step: TrainingStep) -> Diagnosis:
    """Return this rank's diagnosis, from its current weights and its last micro-batch run once more.

    Every rank must call it.
    """
    state = take_step.state
    with trace_nonfinite(state.model) as watch:
        images, loss = take_step.repeat() or (None, None)
    streak = int(state.streak)
    names = {module: name for name, module in state.model.named_modules()}
    if not is_finite(images):
        return Diagnosis(streak, "images", "the images are not finite")
    layers = dict.fromkeys((*watch.called, *names))
    values = [(layer, is_finite(value)) for layer in layers for value in must_be_finite(layer, recurse=False).values()]
    spoilt = [layer for layer, sound in values if not sound]
    if spoilt:
        first, many = _tell(spoilt[0], names), f"{len(spoilt)} of its {len(values)} parameters and statistics"
        return Diagnosis(streak, "weights", f"{many} are not finite, the first of them in {first}")
    if watch.first is not None:
        first = _tell(watch.first, names)
        return Diagnosis(streak, "layer", f"{first} is the first layer whose output is not finite though its input is")
    if not is_finite(loss) and not watch.arrived_so:
        return Diagnosis(streak, "loss", "the loss is not finite, though the network's output is")
    return Diagnosis(streak, "elsewhere", "the last micro-batch, repeated, does not show where")


def nonfinite_message(take_step: TrainingStep, keep: CheckpointManager, world: DistContext) -> str:
    """Return the message that explains why the run ends, the same on every rank.

    Every rank must call it.

    The message is about the rank, among those that found something, whose loss was the first not to be finite. Ties, as
    between the stages of a pipeline, which share one loss, go to the earlier ``Location``, then to the lower rank.
    """
    state = take_step.state
    findings: list[Diagnosis] = [Diagnosis(0, "elsewhere", "")] * world.size
    dist.all_gather_object(findings, examine(take_step))
    order = get_args(Location).index
    found = min(findings, key=lambda one: (one.place == "elsewhere", -one.streak, order(one.place)))
    last_good = state.step - found.streak  # or the step whose update spoilt the weights: its own loss was finite
    state.outcome.wrong_from = wrong_from = last_good + 1
    if found.streak:
        steps = "1 step" if found.streak == 1 else f"{found.streak} steps"
        sentence = f"the loss has not been finite for {steps}, from step {wrong_from} on"
    else:
        sentence = f"step {last_good} has left values that are not finite"
    remedy = (
        "see to data.mean, data.std and the images" if found.place == "images" else
        "lower optim.lr or lengthen schedule.warmup_epochs, and begin another run"
    )  # fmt: skip
    saved = keep.last_saved()
    kept = f"the last checkpoint is that of step {saved}" if saved else "no checkpoint had been written"
    return broadcast_error(f"{sentence}: on rank {findings.index(found)} {found.what}; {remedy}; {kept}", world.device)


def _tell(layer: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """Return the layer's name in the network and its type."""
    name = names.get(layer)
    return f"{name} ({type(layer).__name__})" if name else f"{type(layer).__name__} itself"
