"""Count steps whose loss is not finite, and find the first module that turns finite values into non-finite ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteTracer:
    """What ``trace_nonfinite`` has found so far."""

    def __init__(self) -> None:
        """Begin before the first forward."""
        self.called: dict[nn.Module, None] = {}
        """Modules in the order of their first call."""
        self.first: nn.Module | None = None
        """First module whose output is not finite though its input is; None if not found.

        Of nested modules, the innermost.
        """
        self.arrived_so = False
        """True if the model's input was already not finite."""
        self._inside: list[nn.Module] = []

    @property
    def _over(self) -> bool:
        return self.first is not None or self.arrived_so

    def enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Check the input of ``module`` before its forward."""
        self.called.setdefault(module)
        if not self._over and not is_finite((inputs, named)):
            if self._inside:
                self.first = self._inside[-1]  # its own code between its children made them
            else:
                self.arrived_so = True
        self._inside.append(module)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: object) -> None:
        """Check the output of ``module`` after its forward."""
        self._inside.pop()
        if not self._over and not is_finite(output):
            self.first = module


@contextmanager
def trace_nonfinite(model: nn.Module) -> Iterator[NonFiniteTracer]:
    """Check the inputs and outputs of every module in forwards of ``model`` in the block.

    The host waits for the device at each check. Compiled code runs eagerly meanwhile, so that its hooks are called.
    """
    watch = NonFiniteTracer()
    with torch.compiler.set_stance("force_eager"), ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(watch.leave, with_kwargs=True))
        yield watch


def is_finite(values: object) -> bool:
    """Return whether all floating-point or complex tensors in nested lists, tuples and dicts are finite.

    Waits for the device.
    """
    match values:
        case Tensor():
            return not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all())
        case list() | tuple():
            return all(is_finite(part) for part in values)
        case dict():
            return all(is_finite(part) for part in values.values())
        case _:
            return True


def must_be_finite(model: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Return parameters and running statistics by name; other buffers, such as masks, may hold infinities."""
    named = [*model.named_parameters(recurse=recurse), *model.named_buffers(recurse=recurse)]
    changing = [
        (name, value.detach()) for name, value in named if isinstance(value, nn.Parameter) or "running_" in name
    ]
    return {name: value for name, value in changing if value.numel() and value.is_floating_point()}


class NonFiniteLoss(Exception):
    """Losses or weights are not finite, so continuing is useless; raised on all ranks alike."""


class NonFiniteCounter:
    """Number of steps in a row, up to the last one, whose loss on this rank was infinite or NaN."""

    def __init__(self, device: torch.device) -> None:
        """Start at 0, on ``device``."""
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        """The count, int32 [], on the device."""

    def add(self, loss: Tensor) -> None:
        """Add the loss of one more step; the host reads nothing back."""
        self.steps.add_(1).mul_(loss - loss != 0)

    def __int__(self) -> int:
        """Return the count; waits for the device."""
        return int(self.steps)
