"""An asynchronous logical OR over ranks, whose result all of them get at the same step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext

_EVERY_S = 0.2  # between two votes, whatever a step takes
_MOST_STEPS = 1000


class AsyncAnyReduce:
    """A vote of all ranks on flags, called once per step, with the same result at the same step on every rank.

    The all-reduce runs on gloo while the next steps are trained, and so needs no GPU stream. It sends 8 bytes per flag
    and 8 more, about five times a second. A flag has effect at most two votes later; with one rank at once.
    """

    def __init__(self, world: DistContext, wishes: int) -> None:
        """Make a gloo group of all ranks, for ``wishes`` flags."""
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._ballot = torch.zeros(wishes + 1, dtype=torch.int64)  # last: steps until the next vote
        self._under_way: dist.Work | None = None
        self._steps = 0
        self._stride = 1
        self._begun = time.perf_counter()
        self.cast = False
        """Whether the last call took this rank's flags."""

    def __call__(self, *wishes: bool) -> list[bool]:
        """Vote with this rank's flags; return which flags any rank has set.

        Flags are taken only if ``cast`` is True afterwards; else pass them again. All results are False at a step at
        which no result is known.
        """
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
        """Wait for the last vote. Call it on every rank, after the last step."""
        self._heard()

    def _heard(self) -> list[bool]:
        if self._under_way is None:
            return [False] * (len(self._ballot) - 1)
        with here.waiting():
            self._under_way.wait()
        self._under_way = None
        *heard, self._stride = self._ballot.tolist()
        return [bool(wish) for wish in heard]
