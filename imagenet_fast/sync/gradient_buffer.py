"""One flat buffer with a place for every gradient, laid out in the order of a pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from imagenet_fast.sync.param_slot import USED, ParamSlot, move
from imagenet_fast.sync.pending_grad import PendingGrad

_LINE = 16  # elements: spans start on 64-byte lines in fp32, so vectorised kernels keep their fast path


class GradientBuffer:
    """Where the gradients of some parameters lie, and how ``p.grad`` looks at them.

    Args:
        spans: In their first order; their places are given here.
        line: Elements; spans begin and end on multiples of it.

    Raises ValueError for parameters that one buffer cannot hold.
    """

    def __init__(self, spans: Sequence[ParamSlot], line: int) -> None:
        kinds = {(span.param.dtype, span.param.device) for span in spans}
        if len(kinds) > 1:
            raise ValueError(f"parameters of one pool share a dtype and a device, found {sorted(map(str, kinds))}")
        ((self._dtype, self._device),) = kinds
        if not self._dtype.is_floating_point:
            raise ValueError(
                f"a pool cannot hold {self._dtype}, which would travel without its imaginary part; "
                "make parameters of torch.view_as_real's kind, and take torch.view_as_complex of them in forward"
            )
        self.values = torch.zeros(0, dtype=self._dtype, device=self._device)
        """All of it, 1-D."""
        self.line = math.lcm(_LINE, line)
        self.multiple = 1
        """Elements, of which its length is a multiple."""
        self.spans: list[ParamSlot] = []
        self.lay_out(spans)

    def lay_out(self, order: Sequence[ParamSlot]) -> None:
        """Give every span its place in this order. Values move with it."""
        old, before = self.values, self.spans
        self.spans = []
        offset = 0
        for index, span in enumerate(order):
            stop = offset + (span.param.numel() // self.line + 1) * self.line
            self.spans.append(replace(span, index=index, start=offset, stop=stop))
            offset = stop
        length = -(-offset // self.multiple) * self.multiple
        self.values = torch.zeros(length, dtype=self._dtype, device=self._device)
        self.span_of = {span.param: span for span in self.spans}
        self._strides = [span.param.stride() for span in self.spans]
        self._known_views: dict[int, list[Tensor]] = {}
        self._make_views()
        move(old, before, self.values, self.spans)
        self._flags = torch.tensor([span.flag for span in self.spans], device=self._device)

    def exchange(self, values: Tensor) -> Tensor:
        """Take other values of the same layout. Returns those of before."""
        before, self.values = self.values, values
        self._make_views()
        return before

    def has_moved(self) -> bool:
        """Whether a parameter has other strides than when this was laid out. Raises RuntimeError where it has another
        dtype, device or shape."""
        moved = False
        for span, view, strides in zip(self.spans, self.views, self._strides, strict=True):
            param = span.param
            if param.dtype != self._dtype or param.device != self._device or param.shape != view.shape:
                raise RuntimeError(
                    f"{span.name} is now {param.dtype} {tuple(param.shape)} on {param.device}, and its gradient pool "
                    f"was made for {self._dtype} {tuple(view.shape)} on {self._device}; convert the model first and "
                    "make the pool after that"
                )
            moved = moved or param.stride() != strides
        return moved

    def gradient(self, span: ParamSlot) -> Tensor:
        """What lies at a span, with the strides that its parameter has now: a fused update would mix them up."""
        view = self.views[span.index]
        if span.param.stride() != self._strides[span.index]:
            view = torch.empty_like(span.param).copy_(view)
        return view

    def mark_used(self, but: Iterable[ParamSlot]) -> None:
        """Fill the flags of all spans ``but`` some."""
        left_out = set(but)
        flags = self._flags
        if left_out:
            here = [span.flag for span in self.spans if span not in left_out]
            flags = torch.tensor(here, device=self._device, dtype=torch.int64)
        self.values.index_fill_(0, flags, USED)

    def _make_views(self) -> None:
        known = self._known_views.get(self.values.data_ptr())
        if known is None:
            known = [self.values.as_strided(s.param.size(), _dense_strides(s.param), s.start) for s in self.spans]
            self._known_views[self.values.data_ptr()] = known
        self.views = known
        """The gradients by span, with their parameters' strides."""
        self.pending: list[PendingGrad] = [view.as_subclass(PendingGrad) for view in known]
        """What stands for them on their way."""


def _dense_strides(param: nn.Parameter) -> tuple[int, ...]:
    """Its own strides; where it does not fill its memory, or overlaps itself, those that a copy would have."""
    return torch.empty_like(param, device="meta").stride()
