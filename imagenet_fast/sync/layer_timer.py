"""A timer of when forward reads each layer and backward has each gradient ready, over a few steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp, seconds_between
from imagenet_fast.sync.front import ForwardHook, fronts
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology

_WARM_STEPS, _TIMED_STEPS = 2, 3


class LayerTimer:
    """A timer that records a model's steps until it has seen enough of them.

    Call ``gradient_ready`` at every gradient that is ready, and ``finish`` at the end of every backward.
    """

    def __init__(
        self, model: nn.Module, slots: Iterable[ParamSlot], topology: Topology, steps: int = _TIMED_STEPS
    ) -> None:
        """Register timing hooks on ``model`` and its layers; where a block is compiled, on the block.

        Args:
            model: The model to time, as it is called.
            slots: The slots in pool order.
            topology: The ranks to average over.
            steps: Number of steps that count, after two that warm up.
        """
        self._slots = list(slots)
        self._device = topology.device
        self._topology = topology
        self._last = _WARM_STEPS + steps
        self._called: dict[nn.Module, Timestamp] = {}
        self._turned: Timestamp | None = None  # the end of the last forward
        self._pushed: list[Timestamp] = []
        self._rows: list[list[float]] = []  # of each step
        around = fronts(model)
        self._fronts = [model if slot.module is None else around.get(slot.module, model) for slot in self._slots]
        self._hooks = [ForwardHook(module, self._call) for module in dict.fromkeys([model, *self._fronts])]
        self._hooks.append(ForwardHook(model, self._turn, behind=True))
        self._model = model

    @property
    def complete(self) -> bool:
        """True if enough steps have been recorded, the same on every rank."""
        return len(self._rows) == self._last

    def gradient_ready(self) -> None:
        """Record that the gradient of the next slot in pool order is ready."""
        self._pushed.append(record_timestamp(self._device))

    def finish(self) -> None:
        """Record the end of backward, and with it of a step."""
        end, first = record_timestamp(self._device), self._pushed[0]
        begin, turn = self._called.get(self._model, first), self._turned or first
        moments = [
            *(seconds_between(begin, self._called.get(front, begin)) for front in self._fronts),
            seconds_between(begin, turn),
            *(seconds_between(turn, pushed) for pushed in self._pushed),
            seconds_between(turn, end),
        ]
        self._rows.append(moments)
        self._called.clear()
        self._pushed.clear()

    def timing(self) -> Timing:
        """Return the median over this rank's steps, averaged over the ranks, and remove the hooks.

        Every rank must call it, once the timer is complete.
        """
        self.close()
        rows = torch.tensor(self._rows[_WARM_STEPS:], dtype=torch.float64, device=self._device)
        mean = rows.median(0).values
        if self._topology.size > 1:
            dist.all_reduce(mean, group=self._topology.group)
        moments, count = (mean / self._topology.size).tolist(), len(self._slots)
        return Timing(tuple(moments[:count]), moments[count], tuple(moments[count + 1 : -1]), moments[-1])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _call(self, module: nn.Module) -> None:
        if module is self._model:  # of several micro-steps, time the last one
            self._called.clear()
        self._called.setdefault(module, record_timestamp(self._device))

    def _turn(self, module: nn.Module) -> None:
        self._turned = record_timestamp(self._device)
