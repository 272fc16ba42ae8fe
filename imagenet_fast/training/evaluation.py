"""Measure exact accuracy: every validation image counts once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from imagenet_fast.data.loaders import ValLoader
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import all_reduce_sum


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy over ``images`` validation images, in percent.

    The label is the first, or among the first five, of the model's guesses.
    """

    top1: float
    top5: float
    images: int


class Stopped(Exception):
    """An evaluation was cut off by a request to stop; raised on every rank."""


def evaluate(
    model: nn.Module,
    dataset: ValLoader,
    cast: torch.autocast,
    world: DistContext,
    asked: Callable[[], bool] = lambda: False,
) -> Accuracy:
    """Classify this rank's shard of the validation set and return the accuracy over all ranks.

    Ranks may hold different numbers of batches, so they communicate only at the end. The model is left in the mode it
    was in.

    Args:
        model: The whole model.
        dataset: Loader of this rank's validation images.
        cast: Context in which the model runs.
        world: This rank and its process group.
        asked: Returns whether to stop; called before each batch.

    Raises:
        Stopped: On every rank, if ``asked`` returned true on any of them.
        AssertionError: The images seen by all ranks do not add up to the validation set.
    """
    training = model.training
    model.eval()
    correct1 = torch.zeros((), dtype=torch.int64, device=world.device)
    correct5 = torch.zeros_like(correct1)
    seen, stopped = 0, False
    batches = dataset.next_evaluation()
    here.enter("evaluation")
    with torch.inference_mode(), cast:
        for images, labels in batches:
            if stopped := asked():
                break
            here.enter("evaluation")  # renewed with each batch: the heartbeat shows progress
            guesses = model(images).topk(min(5, dataset.classes), dim=1).indices == labels[:, None]
            correct1 += guesses[:, 0].sum()
            correct5 += guesses.sum()
            seen += len(labels)
    model.train(training)
    counts = (float(correct1), float(correct5), float(seen))
    hits1, hits5, images_seen, cut_off = all_reduce_sum(*counts, float(stopped), device=world.device)
    if cut_off:
        raise Stopped
    expected = dataset.val_order.images
    assert images_seen == expected, f"evaluated {images_seen:.0f} of {expected} images"
    return Accuracy(100 * hits1 / expected, 100 * hits5 / expected, expected)
