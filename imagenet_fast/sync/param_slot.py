"""A parameter's place in the gradient pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

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


def label_of(slots: Sequence[ParamSlot]) -> str:
    """Return a readable name for neighbouring slots: their layer, or their first and last layer."""
    first, last = slots[0].layer, slots[-1].layer
    return first if first == last else f"{first} to {last}"
