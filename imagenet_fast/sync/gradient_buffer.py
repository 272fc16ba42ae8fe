"""One flat buffer that holds every gradient of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync.engine import Elements
from imagenet_fast.sync.param_slot import USED, ParamSlot, move
from imagenet_fast.sync.topology import Topology

_CACHE_LINE = 16  # elements: slots start on 64-byte lines in fp32, which keeps the fast path of vectorised kernels

_METADATA = frozenset({
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "requires_grad", "grad_fn",
        "is_leaf", "ndim", "grad", "nbytes", "itemsize",
    )),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.data_ptr, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.nelement,
})  # fmt: skip
"""The functions that are allowed: they do not depend on values."""


_ZEROING = frozenset({Tensor.zero_, Tensor.requires_grad_, torch._foreach_zero_})
"""The functions that ``zero_grad(set_to_none=False)`` of an optimizer or a module calls."""


class GradientBuffer:
    """A flat buffer of gradients, and the views of it that ``p.grad`` holds."""

    def __init__(self, slots: Sequence[ParamSlot], alignment: int) -> None:
        """Create a buffer of zeros.

        Args:
            slots: The slots in their initial order. Their ``index``, ``start`` and ``stop`` are ignored.
            alignment: In elements; slots begin and end on multiples of it.

        Raises:
            ValueError: The parameters differ in dtype or device, are complex or of another dtype that is not a
                floating-point one, have gradients of another dtype, or are shards.
        """
        for slot in slots:
            if hasattr(slot.param, "placements"):
                raise ValueError(
                    f"{slot.name} is a DTensor, as fully_shard makes them, whose gradients torch averages itself; give "
                    "the pool a model of whole parameters"
                )
            if getattr(slot.param, "grad_dtype", None) not in (None, slot.param.dtype):
                raise ValueError(
                    f"{slot.name} is of {slot.param.dtype} and its grad_dtype {slot.param.grad_dtype}; leave that out, "
                    "an engine's wire is the dtype that is sent"
                )
        kinds = {(slot.param.dtype, slot.param.device) for slot in slots}
        if len(kinds) > 1:
            first = slots[0].param
            odd = next(s for s in slots if (s.param.dtype, s.param.device) != (first.dtype, first.device))
            raise ValueError(
                f"parameters of one pool share a dtype and a device, and {odd.name} is of {odd.param.dtype} on "
                f"{odd.param.device} beside {first.dtype} on {first.device}; make a pool of each kind, by "
                "GradientPool(named, model=model)"
            )
        ((self._dtype, self._device),) = kinds
        if not self._dtype.is_floating_point:
            raise ValueError(
                f"a pool cannot hold {self._dtype}, which would travel without its imaginary part; "
                "make parameters of torch.view_as_real's kind, and take torch.view_as_complex of them in forward"
            )
        self.values = torch.zeros(0, dtype=self._dtype, device=self._device)
        """The whole buffer, 1-D."""
        self.alignment = math.lcm(_CACHE_LINE, alignment)
        self.multiple = 1
        """The number of elements of which the buffer's length is a multiple."""
        self.slots: list[ParamSlot] = []
        self.lay_out(slots)

    def show_only(self, sent: Elements) -> None:
        """Put copies of the gradients into ``p.grad`` that are zero where nothing was sent: the rest is a residual."""
        for slot in self.slots:
            if (whole := slot.param.grad) is not None:
                shown = self.values.new_zeros(slot.param.numel())
                for part in sent.get(slot.param, ()):
                    shown[part] = self.values[slot.start + part.start : slot.start + part.stop]
                slot.param.grad = shown.as_strided(whole.size(), whole.stride())

    def lay_out(self, order: Sequence[ParamSlot]) -> None:
        """Give every slot its place in this order, and move the values along."""
        old, before = self.values, self.slots
        self.slots = []
        offset = 0
        for index, slot in enumerate(order):
            stop = offset + (slot.param.numel() // self.alignment + 1) * self.alignment
            self.slots.append(replace(slot, index=index, start=offset, stop=stop))
            offset = stop
        length = -(-offset // self.multiple) * self.multiple
        self.values = torch.zeros(length, dtype=self._dtype, device=self._device)
        self.slot_of = {slot.param: slot for slot in self.slots}
        self._strides = [slot.param.stride() for slot in self.slots]
        self._views = [self.values.as_strided(s.param.size(), _dense_strides(s.param), s.start) for s in self.slots]
        self._pending = [view.as_subclass(PendingGrad) for view in self._views]
        self._make_views()
        move(old, before, self.values, self.slots)
        self._flags = torch.tensor([slot.flag for slot in self.slots], device=self._device)

    def adopt(self, slot: ParamSlot, gradient: Tensor) -> None:
        """Take ``gradient`` as the view of ``slot`` until ``release``, which costs no copy into the buffer."""
        self.views[slot.index] = gradient
        self.pending[slot.index] = gradient.as_subclass(PendingGrad)
        self._adopted = True

    def release(self) -> None:
        """Take the buffer's own views again."""
        if self._adopted:
            self._make_views()

    def has_moved(self) -> bool:
        """Return whether any parameter's strides have changed since the buffer was laid out.

        Raises:
            RuntimeError: A parameter's dtype, device or shape has changed.
        """
        moved = False
        for slot, view, strides in zip(self.slots, self.views, self._strides, strict=True):
            param = slot.param
            if param.dtype != self._dtype or param.device != self._device or param.shape != view.shape:
                raise RuntimeError(
                    f"{slot.name} is now {param.dtype} {tuple(param.shape)} on {param.device}, and its gradient pool "
                    f"was made for {self._dtype} {tuple(view.shape)} on {self._device}; convert the model first and "
                    "make the pool after that"
                )
            moved = moved or param.stride() != strides
        return moved

    def gradient(self, slot: ParamSlot) -> Tensor:
        """Return the gradient at ``slot``, with the strides that the parameter has now.

        A copy is made where the strides have changed: a fused optimizer would mix up the elements.
        """
        view = self.views[slot.index]
        if slot.param.stride() != self._strides[slot.index]:
            view = torch.empty_like(slot.param).copy_(view)
        return view

    def mark_used(self, but: Iterable[ParamSlot]) -> None:
        """Set the flags of all slots except ``but`` to ``USED``."""
        left_out = set(but)
        flags = self._flags
        if left_out:
            here = [slot.flag for slot in self.slots if slot not in left_out]
            flags = torch.tensor(here, device=self._device, dtype=torch.int64)
        self.values.index_fill_(0, flags, USED)

    def _make_views(self) -> None:
        self.views, self.pending = list(self._views), list(self._pending)
        """The gradients in the order of ``slots``, with their parameters' strides; and placeholders in flight."""
        self._adopted = False


def _dense_strides(param: nn.Parameter) -> tuple[int, ...]:
    """Return the parameter's strides; if it has gaps or overlaps in memory, those that a copy would have."""
    return torch.empty_like(param, device="meta").stride()


class PendingGrad(Tensor):
    """A placeholder for a gradient between backward and ``pool.finish()``.

    Any use except of its metadata (shape, dtype, ...) raises RuntimeError. Zeroing only sets ``zeroed``; the pool
    zeroes the gradient once it has been received.

    With DDP, ``p.grad`` holds means at this time. Here messages may still be in flight: a read would give neither the
    local gradient nor the mean, and a write might reach some ranks and not others.
    """

    zeroed = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata, record zeroing, and raise RuntimeError for everything else."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in _ZEROING:
            if func is not Tensor.requires_grad_:
                for grad in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                    grad.__dict__["zeroed"] = True
            return args[0]
        if func is Tensor.__repr__:
            return "PendingGrad(on its way to the other ranks)"
        raise RuntimeError(
            "a gradient was used while it is on its way to the other ranks; call pool.finish() after backward, before "
            "gradients are read, clipped, unscaled or applied"
        )


class ArrivalOrder:
    """The order of gradients, learned in the first complete backward."""

    def __init__(self) -> None:
        """Begin to record, with no order known."""
        self._came: list[ParamSlot] | None = []
        self.better: list[ParamSlot] | None = None
        """The learned order, if it differs from the current one; for the pool to adopt before the next step."""

    @property
    def is_known(self) -> bool:
        """True if the order has been learned or fixed."""
        return self._came is None

    def fix(self) -> None:
        """Keep the current order, and learn no other."""
        self._came = self.better = None

    def note(self, slot: ParamSlot) -> None:
        """Record that backward has produced the gradient of ``slot``."""
        if self._came is not None:
            self._came.append(slot)

    def agree(self, slots: Sequence[ParamSlot], topology: Topology, whole: bool) -> None:
        """Adopt the order that the first rank saw. Every rank must call it.

        Gradients that backward did not produce are put last. Where the first rank's backward was not complete, nothing
        is adopted and the next backward is recorded.

        Args:
            slots: The pool's slots in their current order.
            topology: The ranks to agree with.
            whole: Whether this rank's backward was complete.
        """
        if self._came is None:
            return
        came, self._came = self._came, []
        seen = set(came)
        order = [slot.index for slot in [*came, *(slot for slot in slots if slot not in seen)]]
        agreed = torch.tensor(order if whole else [-1] * len(order), device=topology.device)
        if topology.size > 1:
            dist.broadcast(agreed, topology.ranks[0], topology.group)
        indices = agreed.tolist()
        if indices[0] < 0:
            return
        self._came = None
        if indices != list(range(len(indices))):
            self.better = [slots[index] for index in indices]
