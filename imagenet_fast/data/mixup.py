"""Training images mixed with one another, on the device: mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et
al., arXiv 1905.04899), by torchvision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torchvision.transforms import v2

from imagenet_fast.data.rng import bits
from imagenet_fast.data.sampler import TrainSampler


class MixupCutmix:
    """Batches of normalised images in ``order``, each image mixed with the one before it in its micro-batch; labels
    become shares of ``classes``, fp32 [n, classes].

    ``mixup`` and ``cutmix`` are the alphas of the Beta distributions that shares are drawn from, 0 for never; with
    both, each micro-batch is mixed in one way or the other. What is drawn is a function of (seed, epoch, first
    image), and micro-batches are the same on any number of ranks.
    """

    def __init__(
        self, batches: Iterable[tuple[Tensor, Tensor]], order: TrainSampler, classes: int, mixup: float, cutmix: float
    ) -> None:
        self._batches = batches
        self._order = order
        self._ways = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
        self._ways += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, (images, labels) in zip(self._order, self._batches, strict=False):
            number = int(bits("mixing", self._order.seed, batch.epoch, of=batch.images[:1])[0])
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the CPU's generator, which is the model's
                torch.default_generator.manual_seed(number)
                way = self._ways[number % len(self._ways)]
                images, labels = way(images, labels)
            yield images.contiguous(memory_format=torch.channels_last), labels
