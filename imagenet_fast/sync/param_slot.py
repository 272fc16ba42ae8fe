"""A parameter's place in the gradient pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

USED = 2.0**-14
"""The value of a slot's flag where a rank has used the parameter.

Every 16-bit float type represents it exactly, and it is too small to hide a gradient.
"""


@dataclass(frozen=True, eq=False)
class ParamSlot:
    """Elements ``start`` to ``stop`` of the pool, including the padding up to the next slot."""

    index: int
    name: str
    param: nn.Parameter
    module: nn.Module | None
    """The module that owns the parameter; one of them where several do, None where the pool has no model."""
    layout: tuple[torch.Size, tuple[int, ...]]
    """The shape and the strides of the parameter when the pool was made."""
    start: int
    stop: int

    @property
    def flag(self) -> int:
        """The index of the pool's element behind the gradient, which is nonzero if any rank has used the parameter."""
        return self.start + self.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.layout[0]

    @property
    def layer(self) -> str:
        """The name of the parameter's module. The module's other parameters are neighbours in the pool."""
        return self.name.rpartition(".")[0]

    @property
    def connected(self) -> bool:
        """Whether the parameter's layer is fully connected: it has a matrix as its weight."""
        owned = (self.param,) if self.module is None else self.module._parameters.values()
        return any(p is not None and p.dim() == 2 for p in owned)


def slots_of(trainable: dict[str, nn.Parameter], model: nn.Module | None) -> list[ParamSlot]:
    """Return a slot without a place for each parameter of ``model``, which may not be known, the last one first."""
    modules = () if model is None else model.modules()
    owners = {param: module for module in modules for param in module._parameters.values() if param is not None}
    return [
        ParamSlot(0, name, param, owners.get(param), (param.shape, param.stride()), 0, 0)
        for name, param in reversed(trainable.items())
    ]


def move(values: Tensor, slots: Sequence[ParamSlot], into: Tensor, others: Sequence[ParamSlot]) -> None:
    """Copy values, flags included, to the places that the same parameters have in another layout.

    Args:
        values: A 1-D tensor laid out as ``slots``.
        slots: The slots to copy from.
        into: A 1-D tensor laid out as ``others``. Slots whose parameter is not in ``slots`` stay unchanged.
        others: The slots to copy to.
    """
    places = {slot.param: slot for slot in slots}
    for slot in others:
        if old := places.get(slot.param):
            into[slot.start : slot.flag + 1] = values[old.start : old.flag + 1]


def elements_in(parts: Iterable[slice], slots: Sequence[ParamSlot]) -> dict[nn.Parameter, list[slice]]:
    """Return the elements of each parameter that lie in ``parts`` of the pool.

    Args:
        parts: Rising, and apart from each other.
        slots: All slots, in pool order.
    """
    inside: dict[nn.Parameter, list[slice]] = {}
    following = iter(slots)
    slot = next(following)
    for part in parts:
        while slot.stop <= part.start:
            slot = next(following)
        while True:
            begin = max(part.start, slot.start) - slot.start
            end = min(part.stop - slot.start, slot.shape.numel())
            if begin < end:
                inside.setdefault(slot.param, []).append(slice(begin, end))
            if slot.stop >= part.stop or slot.index == len(slots) - 1:
                break
            slot = next(following)
    return inside


def label_of(slots: Sequence[ParamSlot]) -> str:
    """Return a readable name for neighbouring slots: their layer, or their first and last layer."""
    first, last = slots[0].layer, slots[-1].layer
    return first if first == last else f"{first} to {last}"
