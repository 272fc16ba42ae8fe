"""Updates that wait for the next forward: a layer is brought up to date just before it is read.

With an engine that defers, gradients still travel when the optimiser would step. The update is therefore kept, with
the learning rate it was made for, and carried out layer by layer as the next forward arrives there. After
hybrid all-reduce (Kim et al., KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191); the result is bit for bit that
of updating at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import increment_version

from imagenet_fast.sync.copies import Hook, settle_before_copies, settle_no_longer
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.readers import Readers
from imagenet_fast.sync.span import Span

Update = Callable[..., object]
"""Applies the gradients of the parameters it is given, a list, and needs no others to do so. From an engine that leaves
some elements behind it also takes which :class:`Elements <imagenet_fast.sync.engine>` it may touch."""


class Deferral:
    """Which spans of ``model`` still wait for their update, and hooks that carry it out in time.

    A parameter is brought up to date before the forward of the module that reads it first, which the first forwards
    show (:class:`Readers <imagenet_fast.sync.readers>`); one that nobody reads is updated at once. Our hooks go before
    a module's others, which may read its parameters (as those of ``nn.utils.prune`` and ``weight_norm``). Who reads a
    parameter before any forward is told so by autograd, which finds it changed; a read that backward has no use for
    goes unnoticed.

    Saving, loading and copying the model, or a part of it, settle first; a copy is free of our hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: SyncEngine,
        spans: Sequence[Span],
        used: Callable[[Sequence[Span]], list[nn.Parameter]],
    ) -> None:
        self.engine = engine
        self._used = used
        self._pending: dict[Span, None] = {}
        self._updates: list[Update] = []
        self._readers = Readers(model, [span.param for span in spans])
        self._lock = threading.RLock()  # several threads may call the model, to evaluate it
        self.lay_out(spans)
        before_forward, settle = Hook(self._before_forward), Hook(lambda *_: self.settle())
        self._modules = list(model.modules())
        self._hooks = []
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(before_forward, prepend=True))
            self._hooks.append(module.register_state_dict_pre_hook(settle))
            self._hooks.append(module.register_load_state_dict_pre_hook(settle))
            settle_before_copies(module, self.settle)

    def close(self) -> None:
        """Leave the model to others. Settles first."""
        self.settle()
        self._readers.close()
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            settle_no_longer(module, self.settle)

    def lay_out(self, spans: Sequence[Span]) -> None:
        """The pool's spans, of which none waits."""
        assert not self._pending
        self._spans = list(spans)
        self._read_by: dict[nn.Module, list[Span]] | None = None
        self._unread: list[Span] = []

    def update(self, apply: Update, at_once: bool) -> None:
        """Put ``apply`` off for every parameter that a forward hook will reach, unless it is to be ``at_once``."""
        with self._lock:
            if self._read_by is None and self._readers.seen:  # else there has been no forward yet to learn from
                self._readers.close()
                by_param = {span.param: span for span in self._spans}
                readers = self._readers.by_module()
                self._read_by = {module: [by_param[param] for param in params] for module, params in readers.items()}
                read = {span for spans in self._read_by.values() for span in spans}
                self._unread = [span for span in self._spans if span not in read]
            if at_once or len(self._pending) < len(self._spans) - len(self._unread):
                self._bring_up_to_date(list(self._pending))  # a forward has read some since the update before
            now = self._spans if at_once or self._read_by is None else self._unread
            if not self._pending and not at_once:
                self._updates = []
                self._pending = dict.fromkeys(span for span in self._spans if span not in set(now))
            if not at_once:
                self._updates.append(apply)
            for span in now:
                self.engine.wait(span)
            if now:
                self._apply([apply], now)
            for span in self._pending:
                span.param.grad = None  # still on its way, and not to be zeroed where it lies

    def settle(self) -> None:
        """Carry out every update that is still put off."""
        with self._lock:
            self._bring_up_to_date(list(self._pending))

    def waits(self, span: Span) -> bool:
        """Whether the update of ``span`` is still put off."""
        return span in self._pending

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        with self._lock:
            if self._pending and self._read_by is not None:
                self._bring_up_to_date(self._read_by.get(module, []))

    def _bring_up_to_date(self, spans: list[Span]) -> None:
        """Carry out what is put off for ``spans``; their gradients are used up."""
        late = [span for span in spans if span in self._pending]
        if not late:
            return
        for span in late:
            self.engine.wait(span)
            del self._pending[span]
        self._apply(self._updates, late)
        for span in late:
            span.param.grad = None

    def _apply(self, updates: Sequence[Update], spans: Sequence[Span]) -> None:
        """Wherever we are called: the forward may run under autocast, or in inference mode."""
        device = spans[0].param.device.type
        infers = torch.is_inference_mode_enabled()
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with (
            torch.inference_mode(False) if infers else nullcontext(),
            torch.no_grad(),
            torch.autocast(device, enabled=False) if casts else nullcontext(),
        ):
            params = self._used(spans)
            for apply in updates:
                apply(params)
        increment_version(params)  # fused optimisers don't, and then autograd could not tell a stale read
