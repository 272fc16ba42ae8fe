"""Every gradient of a model in one flat buffer, in the order backward produces them.

The buffer is what engines send: any run of neighbouring gradients is one contiguous slice of it, so fusing
tensors into one message (GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from imagenet_fast.sync.engine import SyncEngine, SyncStats

_LINE = 16  # elements: spans start on 64-byte lines in fp32, so vectorised kernels keep their fast path


@dataclass(frozen=True, eq=False)
class Span:
    """One parameter's place in the pool: elements ``start`` to ``stop``, padding to the next span included."""

    index: int
    name: str
    param: nn.Parameter
    start: int
    stop: int


class GradientPool:
    """One flat buffer holding the gradient of every trainable parameter, last layer first.

    During backward a hook moves each finished gradient into its place and makes ``p.grad`` a view of it,
    with the parameter's own strides (channels_last survives). Autograd hands over a fresh tensor and we copy
    it, rather than letting autograd accumulate into the view: that costs two passes over memory instead of
    the four of a memset and an in-place add. Later micro-steps of one step do add in place.

    All parameters must share one dtype and device. Spans reach the engine strictly in pool order, the same on
    every rank, although hooks fire in an order of their own.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not trainable:
            raise ValueError("the model has no trainable parameter")
        kinds = {(p.dtype, p.device) for _, p in trainable}
        if len(kinds) > 1:
            raise ValueError(f"parameters of one pool share a dtype and a device, found {sorted(map(str, kinds))}")

        self.spans: list[Span] = []
        self._views: list[Tensor] = []
        offset = 0
        for index, (name, param) in enumerate(reversed(trainable)):
            stop = offset + -(-param.numel() // _LINE) * _LINE
            self.spans.append(Span(index, name, param, offset, stop))
            offset = stop
        first = self.spans[0].param
        self.buffer = torch.zeros(offset, dtype=first.dtype, device=first.device)
        for span in self.spans:
            p = span.param
            self._views.append(self.buffer.as_strided(p.size(), p.stride(), span.start))
            p.register_post_accumulate_grad_hook(partial(self._collect, span))

        self._engine: SyncEngine | None = None
        self._sync = True
        self._ready = [False] * len(self.spans)
        self._front = 0  # spans before this one have been handed to the engine

    def attach(self, engine: SyncEngine) -> None:
        """Send the spans of every later backward to ``engine``."""
        self._engine = engine

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one. Touches no memory."""
        for span in self.spans:
            span.param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: a backward inside hands nothing to the engine (as DDP's ``no_sync``)."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def finish(self) -> SyncStats:
        """End of the step's last backward: agree on every gradient that may not be deferred.

        Parameters that backward did not reach take part with a gradient of zero, so an unused layer neither
        stalls the frontier nor makes ranks disagree.
        """
        assert self._engine is not None, "attach an engine before the first step"
        for span, view in zip(self.spans, self._views, strict=True):
            if span.param.grad is None:
                span.param.grad = view.zero_()
        self._ready = [True] * len(self.spans)
        self._advance(self._engine)
        self._front = 0
        self._ready = [False] * len(self.spans)
        return self._engine.finish()

    def _collect(self, span: Span, param: nn.Parameter) -> None:
        view = self._views[span.index]
        if param.grad is not view:
            assert param.grad is not None
            view.copy_(param.grad)
            param.grad = view
        if self._sync and self._engine is not None:
            self._ready[span.index] = True
            self._advance(self._engine)

    def _advance(self, engine: SyncEngine) -> None:
        """Move the frontier past every leading span that is ready, handing each to the engine."""
        while self._front < len(self.spans) and self._ready[self._front]:
            engine.push(self.spans[self._front])
            self._front += 1
