"""The modules that read each parameter, observed while the first forwards run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from imagenet_fast.sync.copy_hooks import Hook


class FirstUseTracker:
    """An observer of the forwards of ``model`` and its modules, until it is closed.

    A parameter is mostly read by the module that owns it. But ``nn.MultiheadAttention`` reads its ``out_proj``, and any
    forward may read a weight before it calls the layer. So the arguments of every torch function that a forward calls
    are inspected. A read that torch does not show, as in compiled code, counts as one by the owner. If the owner is not
    called, it counts as one by the nearest ancestor that is.
    """

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Hook every module of ``model``; only reads of ``params`` are recorded."""
        self._model = model
        self._params = set(params)
        self._reads: dict[nn.Parameter, dict[nn.Module, None]] = {}
        self._called: set[nn.Module] = set()
        self._thread = threading.local()
        enter, leave = Hook(self._enter), Hook(self._leave)
        self._hooks = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    @property
    def called(self) -> set[nn.Module]:
        """The modules whose forward has run."""
        return self._called

    def close(self) -> None:
        """Stop observing."""
        for hook in self._hooks:
            hook.remove()

    def by_module(self) -> dict[nn.Module, dict[nn.Parameter, None]]:
        """Return the parameters that must be up to date before each module's forward, without those never read."""
        readers: dict[nn.Module, dict[nn.Parameter, None]] = {}

        def visit(owner: nn.Module, reader: nn.Module | None) -> None:
            if owner in self._called:
                reader = owner
            for param in owner._parameters.values():
                owners = [reader] if reader is not None else []
                if param is None or param not in self._params:
                    continue
                for module in self._reads.get(param, owners):
                    readers.setdefault(module, {})[param] = None
            for child in owner.children():
                visit(child, reader)

        visit(self._model, None)
        return readers

    def _enter(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        inside: list[nn.Module] = vars(self._thread).setdefault("inside", [])
        if not inside:
            self._thread.reading = _Reading(self._note)
            self._thread.reading.__enter__()
        inside.append(module)
        self._called.add(module)

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        inside: list[nn.Module] = vars(self._thread).get("inside", [])
        if inside and inside[-1] is module:
            inside.pop()
            if not inside:
                self._thread.reading.__exit__(None, None, None)

    def _note(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and tensor in self._params:
            self._reads.setdefault(tensor, {})[self._thread.inside[-1]] = None


class _Reading(TorchFunctionMode):
    """A mode that calls ``note`` with every tensor passed to a torch function."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            self._note(tensor)
        return function(*args, **(kwargs or {}))


def _tensors(value: object) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for part in value:
                yield from _tensors(part)
        case dict():
            for part in value.values():
                yield from _tensors(part)
