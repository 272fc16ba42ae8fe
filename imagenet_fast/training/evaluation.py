"""Measure exact accuracy: every validation image counts once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    top1_mirror: float | None = None
    """Top-1 by the mean logits of each image and its mirror image; None: not measured."""
    top5_mirror: float | None = None
    """Top-5 by the same."""

    @property
    def mirrored(self) -> dict[str, float]:
        """The accuracies with mirror images, by name; empty if not measured."""
        both = {"top1_mirror": self.top1_mirror, "top5_mirror": self.top5_mirror}
        return {name: value for name, value in both.items() if value is not None}


class Stopped(Exception):
    """An evaluation was cut off by a request to stop; raised on every rank."""


def evaluate(
    model: nn.Module,
    dataset: ValLoader,
    cast: torch.autocast,
    world: DistContext,
    asked: Callable[[], bool] = lambda: False,
    mirror: bool = False,
) -> Accuracy:
    """Classify this rank's shard of the validation set with the whole model; return the accuracy over all ranks.

    Ranks may hold different numbers of batches, so they communicate only at the end. The model is left in the mode it
    was in. ``asked`` is called before each batch and returns whether to stop. With ``mirror``, measure the accuracy by
    the mean logits of each image and its mirror image, too.

    Raises:
        Stopped: On every rank, if ``asked`` returned true on any of them.
        AssertionError: The images seen by all ranks do not add up to the validation set.
    """
    training = model.training
    model.eval()
    correct = torch.zeros(4 if mirror else 2, dtype=torch.int64, device=world.device)  # top-1, top-5; mirrored
    seen, stopped = 0, False
    batches = dataset.next_evaluation()
    here.enter("evaluation")
    with torch.inference_mode(), cast:
        for images, labels in batches:
            if stopped := asked():
                break
            here.enter("evaluation")  # renewed with each batch: the heartbeat shows progress
            logits = model(images)
            correct[:2] += _hits(logits, labels)
            if mirror:
                correct[2:] += _hits(logits + model(images.flip(3)), labels)
            seen += len(labels)
    model.train(training)
    *hits, images_seen, cut_off = all_reduce_sum(*correct.tolist(), float(seen), float(stopped), device=world.device)
    if cut_off:
        raise Stopped
    expected = dataset.val_order.images
    assert images_seen == expected, f"evaluated {images_seen:.0f} of {expected} images"
    top1, top5, *mirrored = (100 * hit / expected for hit in hits)
    return Accuracy(top1, top5, expected, *mirrored)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels are the first, and among the first five, of the guesses: int64 [2]."""
    guesses = logits.topk(min(5, logits.size(1)), dim=1).indices == labels[:, None]
    return torch.stack([guesses[:, 0].sum(), guesses.sum()])
