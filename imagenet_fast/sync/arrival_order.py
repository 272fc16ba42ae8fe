"""The order in which a model's gradients come, which all ranks take from the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology


class ArrivalOrder:
    """Learns the order of gradients in the first whole backward."""

    def __init__(self) -> None:
        self._came: list[ParamSlot] | None = []
        self.better: list[ParamSlot] | None = None
        """An order that fits better than today's, before the next step."""

    @property
    def is_known(self) -> bool:
        """Whether there is nothing left to learn."""
        return self._came is None

    def fix(self) -> None:
        """Learn no other order than today's."""
        self._came = self.better = None

    def note(self, span: ParamSlot) -> None:
        """This span's gradient has come."""
        if self._came is not None:
            self._came.append(span)

    def agree(self, spans: Sequence[ParamSlot], topology: Topology, whole: bool) -> None:
        """Take the first rank's order, in which gradients that did not come are last. Does nothing if that rank has not
        seen the ``whole`` of its backward: then the next one tells. Every rank calls it."""
        if self._came is None:
            return
        came, self._came = self._came, []
        seen = set(came)
        order = [span.index for span in [*came, *(span for span in spans if span not in seen)]]
        agreed = torch.tensor(order if whole else [-1] * len(order), device=topology.device)
        if topology.size > 1:
            dist.broadcast(agreed, topology.ranks[0], topology.group)
        indices = agreed.tolist()
        if indices[0] < 0:
            return
        self._came = None
        if indices != list(range(len(indices))):
            self.better = [spans[index] for index in indices]
