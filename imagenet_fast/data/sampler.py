"""Assign images to steps and ranks, in one global order whatever the number of ranks, and choose their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.data.rng import bits
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData

Indices = NDArray[np.int64]


class BatchIndices(NamedTuple):
    """A rank's batch: indices ``images`` [n], and the epoch, counted from 0 (always 0 in an evaluation)."""

    epoch: int
    images: Indices
    done: float = 0.0
    """Share of the epoch's steps that were taken before this batch's, from 0 to below 1."""


@dataclass(frozen=True)
class TrainSampler:
    """This rank's micro-batches of a training set, epoch after epoch without end, from ``first_step`` on.

    Every epoch is a new permutation of all images, the same on every rank. A step takes its next global batch, cut
    into micro-batches. The number of ranks decides only which rank computes which micro-batch. So a run on another
    number of ranks sees the same micro-batches (and the same batch-norm statistics). Images that do not fill a global
    batch are left out of that epoch. The ranks of a pipeline, a stride of ``batching.readers`` apart, read the same
    images.

    The order is a function of the seed and the epoch. So a sampler that begins at the step where another run stopped
    continues as that run would have, also on another number of ranks.
    """

    images: int
    batching: Batching
    rank: int
    seed: int
    first_step: int = 0
    """Number of steps already taken, over all epochs."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole global batches in an epoch."""
        return self.images // self.batching.global_batch

    def __iter__(self) -> Iterator[BatchIndices]:
        """Yield this rank's micro-batches without end."""
        epoch, begin = divmod(self.first_step, self.steps_per_epoch)
        split = (self.batching.readers, self.batching.accumulation, self.batching.micro_batch)
        while True:
            order = np.argsort(bits("order", self.seed, epoch, of=np.arange(self.images)), kind="stable")
            for step in range(begin, self.steps_per_epoch):
                start = step * self.batching.global_batch
                batch = order[start : start + self.batching.global_batch]
                for images in batch.reshape(split)[self.rank % self.batching.readers]:
                    yield BatchIndices(epoch, images, step / self.steps_per_epoch)
            epoch, begin = epoch + 1, 0


@dataclass(frozen=True)
class EvalSampler:
    """This rank's batches of a validation set: a contiguous shard, each image once; the last batch may be smaller.

    Shards differ by at most one image, and a rank may have none. Iteration starts over without end; ``batches`` is the
    length of one evaluation.
    """

    images: int
    batch: int
    ranks: int
    rank: int

    @property
    def shard(self) -> range:
        """Indices of this rank's images."""
        return range(self.images * self.rank // self.ranks, self.images * (self.rank + 1) // self.ranks)

    @property
    def batches(self) -> int:
        """Number of this rank's batches in one evaluation."""
        return -(-len(self.shard) // self.batch)

    def __iter__(self) -> Iterator[BatchIndices]:
        """Yield the batches of one evaluation after another, without end; none if the shard is empty."""
        shard = np.asarray(self.shard)
        while self.batches:
            for start in range(0, len(shard), self.batch):
                yield BatchIndices(0, shard[start : start + self.batch])


Order = TrainSampler | EvalSampler


class Resolution(NamedTuple):
    """The size of the images of a step, in pixels."""

    size: int
    """Side of the square image that the network receives."""
    shorter: int
    """Shorter side of the whole image before a central crop."""


def resolution(data: ImageData, order: Order, batch: BatchIndices) -> Resolution:
    """Return the resolution of the images of ``batch`` in ``order``.

    Progressive resizing follows Howard ("Training Imagenet in 3 hours for USD 25; and CIFAR10 for USD 0.26", fast.ai,
    2018). With ``size_multiple`` it follows Composer's ProgressiveResizing, which rounds a linear ramp.
    """
    if not isinstance(order, TrainSampler):
        return Resolution(data.evaluated_size, data.resize)
    now = 1 + batch.epoch + batch.done
    passed = [knot for knot in data.sizes if knot[0] <= now]
    size = passed[-1][1] if passed else data.image_size
    if passed and data.size_multiple and len(passed) < len(data.sizes):
        (begin, smaller), (end, larger) = passed[-1], data.sizes[len(passed)]
        exact = smaller + (larger - smaller) * (now - begin) / (end - begin)
        size = round(exact / data.size_multiple) * data.size_multiple
    return Resolution(size, data.resize * size // data.image_size)
