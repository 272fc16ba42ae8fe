"""Every gradient of a model in one flat buffer, in the order backward produces them.

The buffer is what engines send: any run of neighbouring gradients is one contiguous slice of it, so fusing
tensors into one message (GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync.deferral import Deferral, Update
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.span import Span
from imagenet_fast.sync.stepping import captured_step, needs_all, settle_before_state

_LINE = 16  # elements: spans start on 64-byte lines in fp32, so vectorised kernels keep their fast path


class GradientPool:
    """One flat buffer holding the gradient of every trainable parameter of ``model``, last layer first.

    During backward a hook moves each finished gradient into its place and makes ``p.grad`` a view of it,
    with the parameter's own strides (channels_last survives). Autograd hands over a fresh tensor and we copy
    it, rather than letting autograd accumulate into the view: that costs two passes over memory instead of
    the four of a memset and an in-place add. Later micro-steps of one step do add in place.

    All parameters must share one dtype and device. Spans reach the engine strictly in pool order, the same on
    every rank, although hooks fire in an order of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
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
            owner = model.get_submodule(name.rpartition(".")[0])
            self.spans.append(Span(index, name, param, owner, offset, stop))
            offset = stop
        first = self.spans[0].param
        self.buffer = torch.zeros(offset, dtype=first.dtype, device=first.device)
        for span in self.spans:
            p = span.param
            self._views.append(self.buffer.as_strided(p.size(), p.stride(), span.start))
            p.register_post_accumulate_grad_hook(partial(self._collect, span))

        self.model = model
        self._engine: SyncEngine | None = None
        self._deferral: Deferral | None = None
        self._sync = True
        self._begun = False
        self._ready = [False] * len(self.spans)
        self._front = 0  # spans before this one have been handed to the engine
        self._finished: SyncStats | None = None  # of the step whose gradients are here

    def attach(self, engine: SyncEngine) -> None:
        """Send the spans of every later backward to ``engine``."""
        self._engine = engine
        if engine.defers:
            self._deferral = Deferral(self.model, engine, self.spans)

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one, except those still to be applied. Touches no memory."""
        self._finished = None
        for span in self.spans:
            if self._deferral is None or not self._deferral.waits(span):
                span.param.grad = None
        if self._engine is not None and self._engine.keeps:
            for part in self._engine.sent:
                self.buffer[part].zero_()

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
        self.settle()  # what this step's forward did not reach
        self._begin()
        for span, view in zip(self.spans, self._views, strict=True):
            if span.param.grad is None:
                span.param.grad = view if self._engine.keeps else view.zero_()
        self._ready = [True] * len(self.spans)
        self._advance(self._engine)
        self._front = 0
        self._begun = False
        self._ready = [False] * len(self.spans)
        self._finished = self._engine.finish()
        return self._finished

    def step(self, optimizer: Optimizer) -> SyncStats:
        """End the step: :meth:`finish`, unless that has been called, and ``optimizer.step()`` with the means.

        Under an engine that defers, each layer is updated just before it is read again, with the hyper-parameters of
        this moment: an ``lr_scheduler`` may step at once. ``optimizer.state_dict()`` carries out what is put off
        first. An optimiser that needs all gradients at once (:func:`needs_all`) waits for them here. Parameters of the
        optimiser that are not in this pool are left alone. Raises ValueError where its step requires a closure, or
        the engine sends a part of the gradients only.
        """
        if self._engine is not None and self._engine.keeps:
            raise ValueError(
                "the engine sends a part of the gradients, and optimisers of torch would apply the rest as well: "
                "take another engine, or pool.update() and an optimiser that heeds pool.sent"
            )
        apply = captured_step(optimizer)
        stats = self.finish() if self._finished is None else self._finished
        if needs_all(optimizer):
            self._update_at_once(apply)
        else:
            settle_before_state(optimizer, self.settle)
            self.update(apply)
        return stats

    def _update_at_once(self, apply: Update) -> None:
        assert self._engine is not None
        for span in self.spans:
            self._engine.wait(span)
        apply([span.param for span in self.spans])

    def update(self, apply: Update) -> None:
        """Have ``apply`` update the parameters it is given: all of them now, or each before it is read again.

        ``apply`` captures what belongs to this step, above all the learning rate.
        """
        if self._deferral is None:
            apply([span.param for span in self.spans])
        else:
            self._deferral.update(apply)

    @property
    def sent(self) -> dict[nn.Parameter, list[slice]] | None:
        """What of each parameter the last step has synchronised and may be updated: elements in the order they lie in
        memory. None: all of everything."""
        assert self._engine is not None
        if not self._engine.keeps or self._engine.sent == [slice(0, self.buffer.numel())]:
            return None
        inside: dict[nn.Parameter, list[slice]] = {}
        spans = iter(self.spans)
        span = next(spans)
        for part in self._engine.sent:
            while span.stop <= part.start:
                span = next(spans)
            while True:
                begin = max(part.start, span.start) - span.start
                end = min(part.stop - span.start, span.param.numel())
                if begin < end:
                    inside.setdefault(span.param, []).append(slice(begin, end))
                if span.stop >= part.stop:
                    break
                span = next(spans)
        return inside

    def settle(self) -> None:
        """Carry out every update that an engine has put off. Forwards and ``state_dict`` of the model do it unasked;
        whoever reads parameters in another way calls this first."""
        if self._deferral is not None:
            self._deferral.settle()

    def _collect(self, span: Span, param: nn.Parameter) -> None:
        if self._deferral is not None and self._deferral.waits(span):
            raise RuntimeError(
                f"{span.name} was read before its update: not by the forward of its own module or of one above, as "
                "in the first step; call pool.settle() before such a forward"
            )
        self._begin()
        view = self._views[span.index]
        if param.grad is not view:
            assert param.grad is not None
            if self._engine is not None and self._engine.keeps:
                view.add_(param.grad)
            else:
                view.copy_(param.grad)
            param.grad = view
        if self._sync and self._engine is not None:
            self._ready[span.index] = True
            self._advance(self._engine)

    def _begin(self) -> None:
        if not self._begun and self._engine is not None:
            self._engine.begin()
            self._begun = True
            self._finished = None

    def _advance(self, engine: SyncEngine) -> None:
        """Move the frontier past every leading span that is ready, handing each to the engine."""
        while self._front < len(self.spans) and self._ready[self._front]:
            engine.push(self.spans[self._front])
            self._front += 1
