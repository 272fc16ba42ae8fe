"""A parameter's place in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Span:
    """Elements ``start`` to ``stop`` of the pool, padding to the next span included."""

    index: int
    name: str
    param: nn.Parameter
    module: nn.Module | None
    """The module that owns the parameter, one of them where several do; None where the pool knows no model."""
    start: int
    stop: int

    @property
    def flag(self) -> int:
        """The pool's element behind its gradient, which says whether any rank has used the parameter."""
        return self.start + self.param.numel()

    @property
    def layer(self) -> str:
        """The name of its module, whose other parameters lie beside it."""
        return self.name.rpartition(".")[0]


def move(values: Tensor, spans: Sequence[Span], into: Tensor, others: Sequence[Span]) -> None:
    """Bring what lies at ``spans`` of ``values`` to the places that its parameters have among ``others``."""
    places = {span.param: span for span in spans}
    for span in others:
        if old := places.get(span.param):
            into[span.start : span.flag + 1] = values[old.start : old.flag + 1]


def label_of(spans: Sequence[Span]) -> str:
    """The layers of neighbouring spans, for a person."""
    first, last = spans[0].layer, spans[-1].layer
    return first if first == last else f"{first} to {last}"
