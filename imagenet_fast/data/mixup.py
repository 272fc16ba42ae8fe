"""Mix training images with one another on the device, with torchvision.

The methods are mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torchvision.transforms import v2

from imagenet_fast.data.rng import bits
from imagenet_fast.data.sampler import TrainSampler


class MixupCutmix:
    """Batches in which each image is mixed with the one before it in its micro-batch.

    Labels become shares of the classes. With both methods, each micro-batch uses one or the other. All random draws
    are a function of (seed, epoch, first image of the micro-batch). So micro-batches are the same on any number of
    ranks.
    """

    def __init__(
        self, batches: Iterable[tuple[Tensor, Tensor]], order: TrainSampler, classes: int, mixup: float, cutmix: float
    ) -> None:
        """Create the mixed batches.

        Args:
            batches: Batches of normalised images and labels, in ``order``.
            order: The sampler of these batches.
            classes: Number of classes.
            mixup: Alpha of the Beta distribution that mixup draws shares from; 0: no mixup.
            cutmix: The same for cutmix.
        """
        self._batches = batches
        self._order = order
        self._ways = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
        self._ways += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield mixed images, in memory like that of the batches, and labels, fp32 [n, classes]."""
        for batch, (images, labels) in zip(self._order, self._batches, strict=False):
            number = int(bits("mixing", self._order.seed, batch.epoch, of=batch.images[:1])[0])
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the CPU generator, and so does the model
                torch.default_generator.manual_seed(number)
                way = self._ways[number % len(self._ways)]
                mixed, labels = way(images, labels)
            yield mixed if mixed.stride() == images.stride() else torch.empty_like(images).copy_(mixed), labels
