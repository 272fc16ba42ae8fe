"""Build the initial model, and load the weights that a run starts from or an evaluation uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_fast.checkpoint import Checkpoint, newest, open_checkpoint
from imagenet_fast.checkpoint.folder import Manifest, read_survey
from imagenet_fast.data.folders import ordered_by_number
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.messages import raise_on_all_ranks
from imagenet_fast.distributed.reductions import RunningMeans, broadcast_model
from imagenet_fast.errors import UserError, warn
from imagenet_fast.models import build_model
from imagenet_fast.models.cifarnet import CifarNet
from imagenet_fast.models.external import check_network, to_channels_last
from imagenet_fast.models.weights import Weights, describe, fill, fit, read_weights, with_classes
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.network import ExternalModel
from imagenet_fast.recipe.schema import Model, Recipe
from imagenet_fast.run.run_dir import RunDir, split_checkpoint, weights_file


def build_initial_model(
    recipe: Recipe, classes: int, world: DistContext, weights: Weights | None = None,
    examples: Callable[[], Iterable[Tensor]] | None = None,
) -> nn.Module:  # fmt: skip
    """Build the recipe's model on this rank's device, with rank 0's weights on every rank.

    Args:
        recipe: The recipe.
        classes: Number of classes.
        world: This rank.
        weights: Result of ``load_initial_weights``; None on rank 0: fresh weights.
        examples: Returns batches of training images, from which fresh weights that depend on images are computed. Only
            called on rank 0, and only for such a model. None: those weights are random.

    Raises:
        UserError: A network defined elsewhere cannot be built, or does not fit the images or the classes.
    """
    torch.manual_seed(recipe.seed)
    random.seed(recipe.seed)  # a network of one's own may draw from these
    np.random.seed(recipe.seed % 2**32)
    model = build_model(recipe.model, classes)
    if weights is not None:
        fill(model, weights)
    elif isinstance(model, CifarNet) and examples is not None and world.is_main:
        model.set_whitening(examples())
    model = model.to(world.device)
    if isinstance(recipe.model, ExternalModel):
        one = recipe.micro_batch == 1 or recipe.global_batch == world.size
        check_network(
            model, recipe.model, classes, sorted(recipe.data.training_sizes), recipe.data.evaluated_size,
            all_used=not recipe.sync.ours, images=1 if one else 2, channels_last=recipe.channels_last,
        )  # fmt: skip
    if recipe.channels_last:
        to_channels_last(model)
    broadcast_model(model)
    return model


def load_initial_weights(
    given: Path, model: Model, classes: int, world: DistContext, fresh_head: bool = False,
    class_names: Sequence[str] = (), evaluates: bool = False,
) -> Weights | None:  # fmt: skip
    """Return the weights that ``given`` names, fitted to ``model``, on rank 0; None on others.

    Others get theirs from rank 0 (``build_initial_model``), so their nodes need no such file. Classes in another
    order than the images' are put into theirs. Warn if the network blurs otherwise than the one that was trained, or
    the images are of other classes.

    Args:
        given: Any form that ``given_weights`` accepts.
        model: The recipe's model.
        classes: Number of classes.
        world: This rank.
        fresh_head: Whether to leave out the weights of the last layer.
        class_names: Names of the images' classes by label; empty if they are not known.
        evaluates: Whether to refuse images of other classes instead.

    Raises:
        UserError: The same on every rank, if rank 0 cannot read the weights or they do not fit.
    """
    found = None
    with raise_on_all_ranks():
        if world.is_main:
            found = fit(given_weights(given), model, classes, fresh_head)
            warn_of_blurpool(found, model)
            if not fresh_head:
                found = _for_classes(found, model, list(class_names), evaluates)
    return found


def _for_classes(weights: Weights, model: Model, class_names: list[str], evaluates: bool) -> Weights:
    """Return the weights with the classes in the data's order: labels are numbers, which would mean other classes."""
    names, by_number = weights.class_names, ordered_by_number(class_names)
    if not names and class_names == sorted(class_names) != by_number:
        first, later = next(pair for pair in zip(class_names, by_number, strict=True) if pair[0] != pair[1])
        raise UserError(
            f"{weights.source} names no classes, and the data has '{first}' before '{later}', perhaps in another "
            "order; number the folders in that of the weights, with equally many digits, and make shards of them anew"
        )
    if not names or not class_names or names == class_names:
        return weights
    if sorted(names) == sorted(class_names):
        return with_classes(weights, model, class_names)
    trained, given = next(pair for pair in zip(names, class_names, strict=False) if pair[0] != pair[1])
    told = f"{weights.source} was trained on other classes: on '{trained}' where the data has '{given}'"
    if evaluates:
        raise UserError(f"{told}; evaluate on images of its classes, under the names that they had in training")
    warn(told)
    return weights


def warn_of_blurpool(weights: Weights, model: Model) -> None:
    """Warn if the network blurs otherwise than the one that was trained: names of weights are the same."""
    about = weights.about.get("model")
    trained = about.get("blurpool", "off") if isinstance(about, dict) else model.blurpool
    if trained != model.blurpool:
        warn(
            f"{weights.source} was trained with model.blurpool '{trained}', and this network has '{model.blurpool}'; "
            f"--set model.blurpool={trained} for the same"
        )


def given_weights(given: Path) -> Weights:
    """Return the weights that ``given`` names.

    ``given`` is one of:
    - a file of weights;
    - the directory of a run, which stands for its final weights;
    - a checkpoint of a run: ``RUN@best``, ``RUN@newest``, ``RUN@step-1200``.

    Raises:
        UserError: There are no such weights. The message lists those that exist.
    """
    folder, which = split_checkpoint(given)
    if which is None:
        return read_weights(weights_file(folder))
    return _saved_weights(chosen_checkpoint(RunDir(folder).checkpoints, which))


def chosen_checkpoint(root: Path, which: str) -> Checkpoint:
    """Return the checkpoint that ``RUN@WHICH`` names.

    Args:
        root: The directory of the run's checkpoints.
        which: ``best``, ``newest``, ``step-N``, or the name of the checkpoint's directory. Of several checkpoints of
            one step, the newest is taken.

    Raises:
        UserError: There is no such checkpoint; the message lists those that exist. Or the directory cannot be read.
    """
    found, _ = read_survey(root)
    if which in ("best", "newest"):
        chosen = newest(root, best=which == "best")
    else:
        same = [f for f, manifest in found.items() if which in (f.name, f"step-{manifest.step}")]
        chosen = open_checkpoint(same[0]) if same else None  # the survey lists the newest first
    if chosen is None:
        raise UserError(f"{root.parent} has no checkpoint '{which}'{_instead(found, which)}")
    return chosen


def _instead(found: Mapping[Path, Manifest], which: str) -> str:
    """Return the end of an error message: what to give in place of ``which``."""
    if not found:
        return "; it holds none; give another run, or leave out the @ for final weights"
    evaluated = any(manifest.top1 is not None for manifest in found.values())
    why = ": none of its checkpoints was evaluated" if which == "best" else ""
    steps = [f"step-{step}" for step in sorted({manifest.step for manifest in found.values()})]
    return f"{why}; there are {', '.join([*['best'] * evaluated, 'newest', *steps])}"


def _saved_weights(checkpoint: Checkpoint) -> Weights:
    """Return the moving average if there is one, or the weights with batch-norm statistics averaged over all ranks."""
    shared = checkpoint.shared
    averaged = shared["average"] is not None
    tensors = dict(shared["average" if averaged else "model"])
    kind = "average" if averaged else "buffers"
    means = RunningMeans()
    for _, own in checkpoint.parts():
        for name, tensor in own[kind].items():
            means.add(name, tensor)
    tensors |= {name: mean for name, mean in means.values.items() if name in tensors}
    about = describe(None, parse_recipe("the checkpoint", shared["recipe"]), shared["data"]["classes"])
    return Weights(str(checkpoint.folder), tensors, about)
