"""What any rank wishes for comes true on all of them, at the same step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext

_EVERY_S = 0.2  # so often ranks vote, whatever a step takes
_MOST_STEPS = 1000


class AsyncAnyReduce:
    """Ranks call it once a step, and hear the same at the same step.

    Ballots are counted while the next steps are trained, over gloo and so without a stream of a GPU: an all-reduce of
    32 bytes about five times a second. A wish is heard of two votes later at most. With one rank it is heard at once.
    """

    def __init__(self, world: DistContext, wishes: int) -> None:
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._ballot = torch.zeros(wishes + 1, dtype=torch.int64)  # and after how many steps to vote again
        self._under_way: dist.Work | None = None
        self._steps = 0
        self._stride = 1
        self._begun = time.perf_counter()
        self.cast = False
        """Whether the last call took this rank's wishes."""

    def __call__(self, *wishes: bool) -> list[bool]:
        """This rank's wishes; which have come true, if that is known at this step. Others are to be had again."""
        self.cast = True
        if self._group is None:
            return list(wishes)
        self._steps += 1
        if self._steps < self._stride:
            self.cast = False
            return [False] * len(wishes)
        heard = self._heard()
        step_s = (time.perf_counter() - self._begun) / self._steps
        self._ballot = torch.tensor([*wishes, min(_MOST_STEPS, max(1, round(_EVERY_S / step_s)))])
        self._under_way = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, self._group, async_op=True)
        self._steps, self._begun = 0, time.perf_counter()
        return heard

    def close(self) -> None:
        """There will be no further step, on any rank."""
        self._heard()

    def _heard(self) -> list[bool]:
        if self._under_way is None:
            return [False] * (len(self._ballot) - 1)
        with here.waiting():
            self._under_way.wait()
        self._under_way = None
        *heard, self._stride = self._ballot.tolist()
        return [bool(wish) for wish in heard]
