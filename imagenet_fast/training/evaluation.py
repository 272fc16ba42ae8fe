"""Measure exact accuracy: every validation image counts once, for any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import pad

from imagenet_fast.data.build import ValLoader, build_val_loader
from imagenet_fast.data.fingerprint import compare_data, contents
from imagenet_fast.data.loader import NO_CLASS
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.messages import first_of_node, from_main, to_main
from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.models import compile_blocks
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.run.result import Accuracy
from imagenet_fast.training.init_weights import build_initial_model, load_initial_weights
from imagenet_fast.training.precision import autocast, effective_precision, forward_dtype, set_float32_math


class StopRequested(Exception):
    """Some rank was asked to stop; raised on every rank."""


def evaluate(
    model: nn.Module, dataset: ValLoader, cast: torch.autocast, world: DistContext,
    asked: Callable[[], bool] = lambda: False, mirror: bool = False, shift: int = 0,
) -> Accuracy:  # fmt: skip
    """Classify this rank's shard of the validation set and return the accuracy over all ranks.

    Ranks may hold different numbers of batches and be unlike fast, so they communicate only at the end. The model is
    left in the mode it was in.

    Args:
        model: The whole model.
        dataset: Loader of this rank's validation images.
        cast: Context in which the model runs.
        world: This rank and its process group.
        asked: Returns whether to stop; called before each batch.
        mirror: Whether to measure the accuracy by the mean logits of each image and its mirror image, too.
        shift: If not 0, measure the accuracy by the mean logits of shifted images, too; see ``shifted_logits``. It
            needs ``mirror``.

    Raises:
        StopRequested: On every rank, if ``asked`` returned true on any of them.
        AssertionError: The images seen by all ranks do not add up to the validation set.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    figures = 1 + mirror + (shift > 0)  # plain, with mirror images, with shifted images
    correct = torch.zeros(figures, 2, dtype=torch.int64, device=world.device)  # top-1, top-5
    bad = torch.zeros((), dtype=torch.int64, device=world.device)
    seen, stopped = 0, False
    batches = dataset.next_evaluation()
    here.enter("evaluation")
    with torch.no_grad(), cast:  # what a network keeps from inference mode could not be used in training
        for images, labels in batches:
            if stopped := asked():
                break
            here.enter("evaluation")  # renewed with each batch: the heartbeat shows progress
            logits = model(images)
            correct[0] += _hits(logits, labels)
            if mirror:
                both = mirrored_logits(model, images, logits)
                correct[1] += _hits(both, labels)
                if shift:
                    correct[2] += _hits(shifted_logits(model, images, both, shift), labels)
            bad += (labels == NO_CLASS).sum()
            seen += len(labels)
    model.train(modes[model])  # a network of one's own may do more in it
    for module, training in modes.items():
        module.training = training  # frozen norms, for example, stay frozen
    counted = to_main([*correct.flatten().tolist(), int(bad), seen, stopped])
    *hits, bad_images, images_seen, cut_off = from_main([sum(of_all) for of_all in zip(*counted, strict=True)])
    if cut_off:
        raise StopRequested
    expected = dataset.val_order.images
    assert images_seen == expected, f"evaluated {images_seen} of {expected} images"
    names = ("top1", "top5", "top1_mirror", "top5_mirror", "top1_shift", "top5_shift")
    accuracies = {name: 100 * hit / expected for name, hit in zip(names, hits, strict=False)}
    return Accuracy(**accuracies, images=expected, bad_images=bad_images or None)


def mirrored_logits(model: nn.Module, images: Tensor, logits: Tensor | None = None) -> Tensor:
    """Return the mean logits of images and their mirror images, in fp32: logits of 16 bits would often tie.

    Args:
        model: The model.
        images: Images [n, 3, S, S].
        logits: Logits of ``images``; None: not known yet.
    """
    plain = model(images) if logits is None else logits
    mean: Tensor = (plain.float() + model(images.flip(3)).float()) / 2
    return mean


def shifted_logits(model: nn.Module, images: Tensor, mirrored: Tensor, shift: int) -> Tensor:
    """Return the mean of ``mirrored`` and the mirrored logits of images that are shifted along the diagonal.

    Half of the weight is on the images as they are. A quarter is on those moved ``shift`` pixels up and left, and a
    quarter on those moved down and right; what comes in at an edge is the image's reflection. airbench evaluates so.

    Args:
        model: The model.
        images: Images [n, 3, S, S].
        mirrored: Mean logits of ``images`` and their mirror images.
        shift: Pixels, fewer than S.
    """
    height, width = images.shape[2:]
    padded = pad(images, (shift,) * 4, mode="reflect")
    down_right = mirrored_logits(model, padded[:, :, :height, :width])
    up_left = mirrored_logits(model, padded[:, :, -height:, -width:])
    return mirrored / 2 + (down_right + up_left) / 4


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels are the first, and among the first five, of the guesses: int64 [2]."""
    guesses = logits.topk(min(5, logits.size(1)), dim=1).indices == labels[:, None]
    return torch.stack([guesses[:, 0].sum(), guesses.sum()])


@dataclass(kw_only=True)
class EvalResult(Accuracy):
    """Result of an evaluation of ``weights``."""

    weights: str
    recipe: str
    model: str
    precision: str
    world_size: int
    eval_s: float
    """Seconds from the first image to the last, with compilation included."""
    images_per_s: float

    def table(self) -> Table:
        """Return the result as a table of one row."""
        rates = {"top-1 %": self.top1, "top-5 %": self.top5, "mirror %": self.top1_mirror, "shift %": self.top1_shift}
        numbers = {name: f"{rate:.2f}" for name, rate in rates.items() if rate is not None}
        numbers |= {"images": str(self.images), "img/s": f"{self.images_per_s:.0f}"}
        return compact_table(("recipe", "model"), list(numbers), [(self.recipe, self.model, *numbers.values())])


def evaluate_weights(evaluation: Evaluation, world: DistContext) -> EvalResult:
    """Classify the whole validation set as training with the recipe does: with its model, precision and batches.

    Every rank must call it.

    Raises:
        UserError: The weights or the images do not fit, or ranks hold other images.
    """
    recipe = evaluation.recipe
    precision, note = effective_precision(recipe.precision, world.bf16)
    if world.is_main:
        print(note, end="")
    with first_of_node(world):
        images = build_val_loader(
            recipe.data, evaluation.data, evaluation.batching, world.rank, world.cores, world.device, recipe.seed,
            forward_dtype(precision), recipe.channels_last,
        )  # fmt: skip
    compare_data(contents(images.class_names, {"images": 0, "digest": ""}, images.val_contents), world)
    weights = load_initial_weights(
        evaluation.weights, recipe.model, images.classes, world, class_names=images.class_names, evaluates=True
    )
    set_float32_math(precision)
    model = build_initial_model(recipe, images.classes, world, weights)
    if recipe.compile and not recipe.ema_decay:  # the moving average is not compiled in training either
        compile_blocks(model)
    begun = time.perf_counter()
    cast = autocast(precision, world.device)
    accuracy = evaluate(model, images, cast, world, mirror=recipe.eval_mirror, shift=recipe.eval_shift)
    seconds = time.perf_counter() - begun
    return EvalResult(
        **vars(accuracy), weights=weights.source if weights is not None else str(evaluation.weights),
        recipe=evaluation.name, model=recipe.model.label, precision=precision.kind, world_size=world.size,
        eval_s=seconds, images_per_s=accuracy.images / seconds,
    )  # fmt: skip
