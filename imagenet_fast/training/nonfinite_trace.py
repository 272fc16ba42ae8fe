"""A forward, looked at module by module: which is the first to make of finite values others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteTracer:
    """Follows forwards of ``model`` by hooks, and what modules are given and return: for all of it the host waits."""

    def __init__(self, model: nn.Module) -> None:
        self.called: dict[nn.Module, None] = {}
        """Its modules, in the order in which they were called first."""
        self.first: nn.Module | None = None
        """The first whose output is not finite though its input is; of those within one another the innermost."""
        self.arrived_so = False
        """Whether what the model was given was not finite."""
        self._inside: list[nn.Module] = []
        self._hooks = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def _over(self) -> bool:
        return self.first is not None or self.arrived_so

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.called.setdefault(module)
        if not self._over and not is_finite((inputs, named)):
            if self._inside:
                self.first = self._inside[-1]  # by what it did itself, between its children
            else:
                self.arrived_so = True
        self._inside.append(module)

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: object) -> None:
        self._inside.pop()
        if not self._over and not is_finite(output):
            self.first = module


@contextmanager
def trace_nonfinite(model: nn.Module) -> Iterator[NonFiniteTracer]:
    """Looks at the forwards of ``model`` inside. Of compiled code it runs the source, so that hooks are called."""
    watch = NonFiniteTracer(model)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield watch
    finally:
        watch.close()


def is_finite(values: object) -> bool:
    """Whether all floating-point tensors in nested lists, tuples and dicts are. Waits for the device."""
    match values:
        case Tensor():
            return not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all())
        case list() | tuple():
            return all(is_finite(part) for part in values)
        case dict():
            return all(is_finite(part) for part in values.values())
        case _:
            return True
