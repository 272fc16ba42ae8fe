"""Updates that wait for the next forward: a layer is brought up to date just before it is read.

With an engine that defers, gradients still travel when the optimiser would step. The update is therefore kept, with
the learning rate it was made for, and carried out layer by layer as the next forward arrives there. After
hybrid all-reduce (Kim et al., KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191); the result is bit for bit that
of updating at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.span import Span

Update = Callable[[list[nn.Parameter]], object]
"""Applies the gradients of some parameters, and needs no others to do so."""


class Deferral:
    """Which spans of ``model`` still wait for their update, and hooks that carry it out in time.

    A module's parameters are read by the module itself, or by an ancestor that never calls it (as
    ``nn.MultiheadAttention`` reads its ``out_proj``); which of the two, the first forward shows. A parameter
    that nobody called could read is updated at once.
    """

    def __init__(self, model: nn.Module, engine: SyncEngine, spans: Iterable[Span]) -> None:
        self._engine = engine
        self._spans = list(spans)
        self._pending: dict[Span, Update] = {}
        self._called: set[nn.Module] = set()
        self._read_by: dict[nn.Module, list[Span]] | None = None
        self._unreached: list[Span] = []
        self._model = model
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward)
        model.register_state_dict_pre_hook(lambda *_: self.settle())

    def update(self, apply: Update) -> None:
        """Put ``apply`` off for every parameter that a forward hook will reach."""
        if not self._called:  # there has been no forward yet to learn from
            apply([span.param for span in self._spans])
            return
        if self._read_by is None:
            self._read_by = self._find_readers()
            reached = {span for spans in self._read_by.values() for span in spans}
            self._unreached = [span for span in self._spans if span not in reached]
        self._pending = dict.fromkeys(self._spans, apply)
        self._bring_up_to_date(self._unreached)

    def settle(self) -> None:
        """Carry out every update that is still put off."""
        self._bring_up_to_date(list(self._pending))

    def waits(self, span: Span) -> bool:
        """Whether the update of ``span`` is still put off."""
        return span in self._pending

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._read_by is None:
            self._called.add(module)
        elif self._pending:
            self._bring_up_to_date(self._read_by.get(module, []))

    def _bring_up_to_date(self, spans: list[Span]) -> None:
        late = [span for span in spans if span in self._pending]
        if not late:
            return
        for span in late:
            self._engine.wait(span)
        apply = self._pending[late[0]]
        apply([span.param for span in late])
        for span in late:
            del self._pending[span]
            span.param.grad = None

    def _find_readers(self) -> dict[nn.Module, list[Span]]:
        """By module: the spans to bring up to date before its forward."""
        readers: dict[nn.Module, list[Span]] = {}
        by_param = {span.param: span for span in self._spans}

        def visit(module: nn.Module, reader: nn.Module | None) -> None:
            if module in self._called:
                reader = module
            for param in module.parameters(recurse=False):
                if reader is not None and param in by_param:
                    readers.setdefault(reader, []).append(by_param[param])
            for child in module.children():
                visit(child, reader)

        visit(self._model, None)
        return readers
