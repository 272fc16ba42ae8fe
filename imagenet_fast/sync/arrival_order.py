"""The order in which backward produces a model's gradients; all ranks take the first rank's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology


class ArrivalOrder:
    """The order of gradients, learned in the first complete backward."""

    def __init__(self) -> None:
        """Begin to record, with no order known."""
        self._came: list[ParamSlot] | None = []
        self.better: list[ParamSlot] | None = None
        """The learned order, if it differs from the current one; for the pool to adopt before the next step."""

    @property
    def is_known(self) -> bool:
        """Whether the order has been learned or fixed."""
        return self._came is None

    def fix(self) -> None:
        """Keep the current order, and learn no other."""
        self._came = self.better = None

    def note(self, span: ParamSlot) -> None:
        """Record that backward has produced the gradient of ``span``."""
        if self._came is not None:
            self._came.append(span)

    def agree(self, spans: Sequence[ParamSlot], topology: Topology, whole: bool) -> None:
        """Adopt the order that the first rank saw. Every rank must call it.

        Gradients that backward did not produce are put last. Where the first rank's backward was not complete, nothing
        is adopted and the next backward is recorded.

        Args:
            spans: The pool's slots in their current order.
            topology: The ranks to agree with.
            whole: Whether this rank's backward was complete.
        """
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
