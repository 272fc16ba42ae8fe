"""Which image goes to which rank in which step: one global order, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from imagenet_fast.recipe.batching import Batching

Indices = NDArray[np.int64]


class BatchIndices(NamedTuple):
    """What a rank sees at once: ``images`` [n], and in which epoch, counted from 0; in an evaluation it is 0."""

    epoch: int
    images: Indices


@dataclass(frozen=True)
class TrainSampler:
    """This rank's micro-batches of a training set, epoch after epoch without end, from ``first_step`` on.

    Every epoch is a new permutation of all images, the same on every rank. A step takes the next global batch
    of it, cut into micro-batches; which rank computes which of them depends on the number of ranks, the
    micro-batches themselves do not, so a run on other ranks sees the same ones (and the same batch-norm
    statistics). What does not fill a global batch is left out of that epoch. The ranks of a pipeline, a stride of
    ``batching.readers`` apart, read the same.

    The order is a function of the seed and the epoch, so one that begins with the step at which another run stopped
    goes on as that would have, also on another number of ranks.
    """

    images: int
    batching: Batching
    rank: int
    seed: int
    first_step: int = 0
    """Steps that were taken before, in all epochs together."""

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.batching.global_batch

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, begin = divmod(self.first_step, self.steps_per_epoch)
        split = (self.batching.readers, self.batching.accumulation, self.batching.micro_batch)
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.images)
            for step in range(begin, self.steps_per_epoch):
                start = step * self.batching.global_batch
                batch = order[start : start + self.batching.global_batch]
                for images in batch.reshape(split)[self.rank % self.batching.readers]:
                    yield BatchIndices(epoch, images)
            epoch, begin = epoch + 1, 0


@dataclass(frozen=True)
class EvalSampler:
    """This rank's part of a validation set: a contiguous shard, each image once, the last batch as it falls.

    Shards differ by at most one image, and a rank may have none. Iterating starts over without end;
    ``batches`` says how many make one evaluation.
    """

    images: int
    batch: int
    ranks: int
    rank: int

    @property
    def shard(self) -> range:
        return range(self.images * self.rank // self.ranks, self.images * (self.rank + 1) // self.ranks)

    @property
    def batches(self) -> int:
        return -(-len(self.shard) // self.batch)

    def __iter__(self) -> Iterator[BatchIndices]:
        shard = np.asarray(self.shard)
        while self.batches:
            for start in range(0, len(shard), self.batch):
                yield BatchIndices(0, shard[start : start + self.batch])


Order = TrainSampler | EvalSampler
