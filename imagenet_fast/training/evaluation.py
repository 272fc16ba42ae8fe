"""Exact accuracy: every validation image counts once, whatever the number of ranks."""

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
    """Percent of ``images`` whose label is the first, or among the first five, of the model's guesses."""

    top1: float
    top5: float
    images: int


class Stopped(Exception):
    """An evaluation was cut off: the same on every rank."""


def evaluate(
    model: nn.Module,
    dataset: ValLoader,
    cast: torch.autocast,
    world: DistContext,
    asked: Callable[[], bool] = lambda: False,
) -> Accuracy:
    """Classify this rank's shard and add up the counts of all ranks.

    Ranks may hold different numbers of batches, so nothing is communicated before the end. The images seen
    must add up to the validation set. Leaves the model in the mode it was in.

    Raises Stopped, on every rank, where any of them was ``asked`` to stop, at which it looks before each batch.
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
            here.enter("evaluation")  # again and again: it goes on
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
