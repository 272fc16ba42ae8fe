"""One flat buffer that holds every gradient of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.messages import places_in_pool
from imagenet_fast.sync.engine import Elements
from imagenet_fast.sync.kept_state import cut, lay
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.param_slot import USED, ParamSlot
from imagenet_fast.sync.pending import PendingGrad
from imagenet_fast.sync.topology import Topology

_CACHE_LINE = 16  # elements: slots start on 64-byte lines in fp32, which keeps the fast path of vectorised kernels


class GradientBuffer:
    """A flat buffer of gradients, and the views of it that ``p.grad`` holds. Engines send from it."""

    def __init__(self, slots: Sequence[ParamSlot], topology: Topology, model: nn.Module | None) -> None:
        """Create a buffer of zeros, for slots in their initial order that have no places yet.

        ``model`` is the one whose forward reads the parameters, if it is known.
        """
        self.topology = topology
        self.model = model
        self.values = torch.zeros(0, dtype=slots[0].param.dtype, device=slots[0].param.device)
        """The whole buffer, 1-D."""
        self.alignment = math.lcm(_CACHE_LINE, topology.size)
        """The number of elements of which the bounds of slots are multiples."""
        self._multiple = 1
        self._timer: LayerTimer | None = None
        self.slots: list[ParamSlot] = []
        """In the order in which they are pushed."""
        self.before_layout: Callable[[], None] = lambda: None
        """Called before values move."""
        self.fill: Callable[[], None] = lambda: None
        """Copies the gradients pushed so far into the buffer. Engines call it before they read or send them."""
        self.lay_out(slots)

    def lay_out(self, order: Sequence[ParamSlot]) -> None:
        """Give every slot its place in this order, and move the values along. The engine must be laid out, too."""
        self.before_layout()
        old, before = self.values, self.slots
        places = places_in_pool((slot.shape.numel() for slot in order), self.alignment)
        self.slots = [
            replace(slot, index=index, start=place.start, stop=place.stop)
            for index, (slot, place) in enumerate(zip(order, places, strict=True))
        ]
        self.values = old.new_zeros(-(-self.slots[-1].stop // self._multiple) * self._multiple)
        self.slot_of = {slot.param: slot for slot in self.slots}
        self.last = max((slot.index for slot in self.slots if slot.shape.numel()), default=0)
        """The index of the last slot that has values."""
        self._addresses = [self.values.data_ptr() + slot.start * self.values.itemsize for slot in self.slots]
        self._views = [self._view(slot) for slot in self.slots]
        self.placeholders = [view.as_subclass(PendingGrad) for view in self._views]
        """What ``p.grad`` holds while gradients are in flight, by slot."""
        lay(cut(before, gradient=old), "gradient", self.slots, self.values)
        self._flags = torch.tensor([slot.flag for slot in self.slots], device=self.values.device)

    def pad(self, multiple: int) -> None:
        """Pad the buffer's length to a multiple of ``multiple`` elements. Engines call it when they are built."""
        self._multiple = multiple
        self.lay_out(self.slots)

    def align_slots(self, elements: int) -> None:
        """Have slots begin and end on multiples of ``elements``. Engines call it when they are built."""
        if self.alignment % elements:
            self.alignment = math.lcm(self.alignment, elements)
            self.lay_out(self.slots)

    def set_order(self, names: Collection[str]) -> bool:
        """Lay the buffer out in the order of ``names``, unless they are those of another model, and return whether."""
        by_name = {slot.name: slot for slot in self.slots}
        known = by_name.keys() == set(names)
        if known:
            self.lay_out([by_name[name] for name in names])
        return known

    def agreed_order(self, came: Iterable[ParamSlot]) -> list[ParamSlot] | None:
        """Return the slots in the order in which they came on the first rank; None if they have it.

        Every rank must call it.
        """
        indices = self.topology.of_first_rank([slot.index for slot in came])
        return None if indices == sorted(indices) else [self.slots[int(index)] for index in indices]

    def layer_timer(self) -> LayerTimer:
        """Return a timer of the next steps in place of the last.

        Raises:
            ValueError: The buffer has no model.
        """
        if self.model is None:
            raise ValueError(
                "an engine that plans needs to see the forward; give the pool model=..., or the engine a fixed number "
                "of MiB"
            )
        self.close()
        self._timer = LayerTimer(self.model, self.slots, self.topology)
        return self._timer

    def close(self) -> None:
        """Remove the hooks of the timer."""
        if self._timer is not None:
            self._timer.close()

    def view(self, slot: ParamSlot) -> Tensor:
        """Return the gradient at ``slot``, with its parameter's strides.

        A new view is made where the user has given another storage to the old one, as ``p.grad.data = ...`` does.
        """
        view = self._views[slot.index]
        if view.data_ptr() != self._addresses[slot.index]:
            view = self._views[slot.index] = self._view(slot)
        return view

    def extent(self, slot: ParamSlot) -> Tensor:
        """Return the values of ``slot`` and its flag, 1-D."""
        return self.values[slot.start : slot.flag + 1]

    def show_only(self, sent: Elements) -> None:
        """Put copies of the gradients into ``p.grad`` that are zero where nothing was sent: the rest is a residual."""
        for slot in self.slots:
            if (whole := slot.param.grad) is not None:
                shown = self.values.new_zeros(slot.shape.numel())
                for part in sent.get(slot.param, ()):
                    shown[part] = self.values[slot.start + part.start : slot.start + part.stop]
                slot.param.grad = shown.as_strided(whole.size(), whole.stride()).detach()

    def mark_used(self) -> None:
        """Set the flags of all slots to ``USED``."""
        self.values.index_fill_(0, self._flags, USED)

    def _view(self, slot: ParamSlot) -> Tensor:
        """Return the gradient at ``slot``, with its parameter's strides; without their gaps or overlaps in memory."""
        dense = torch.empty_like(torch.empty_strided(*slot.layout, device="cpu"), device="meta")  # of meta: loads sympy
        return self.values.as_strided(slot.shape, dense.stride(), slot.start).detach()  # else a view
