"""A parameter's place in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

USED = 2.0**-14
"""In a span's flag, where a rank has used its parameter: any 16-bit type holds it, and it hides no gradient."""


@dataclass(frozen=True, eq=False)
class ParamSlot:
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


def move(values: Tensor, spans: Sequence[ParamSlot], into: Tensor, others: Sequence[ParamSlot]) -> None:
    """Bring what lies at ``spans`` of ``values`` to the places that its parameters have among ``others``."""
    places = {span.param: span for span in spans}
    for span in others:
        if old := places.get(span.param):
            into[span.start : span.flag + 1] = values[old.start : old.flag + 1]


Places = dict[str, tuple[int, int]]
"""Of parameters by name, in the order of a pool: where their gradient begins, and the flag behind it."""


def places_of(spans: Sequence[ParamSlot]) -> Places:
    return {span.name: (span.start, span.flag) for span in spans}


def bring(values: Tensor, places: Places, into: Tensor, spans: Sequence[ParamSlot]) -> None:
    """As :func:`move`, from a pool that is no more: ``places`` tell how it was laid out."""
    for span in spans:
        start, flag = places.get(span.name, (0, -1))
        if flag - start == span.param.numel():
            into[span.start : span.flag + 1] = values[start : flag + 1]


def label_of(spans: Sequence[ParamSlot]) -> str:
    """The layers of neighbouring spans, for a person."""
    first, last = spans[0].layer, spans[-1].layer
    return first if first == last else f"{first} to {last}"
