"""Hooks in front of a module's forward that stay outside of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

Call = Callable[[nn.Module], None]


def fronts(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return, by module, the one that can have its hook: the outermost compiled module around it, or itself."""
    found: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, outer: nn.Module | None, above: nn.Module) -> None:
        if outer is None and is_compiled(module):
            outer = module
        hooked = above if isinstance(module, ScriptModule) else module  # a scripted module takes no hook
        found.setdefault(module, hooked if outer is None else outer)  # the truth of a module may be its length
        for child in module.children():
            visit(child, outer, hooked)

    visit(model, None, model)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module is what ``torch.compile`` returns, or was compiled by its method."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def before_forward(module: nn.Module, call: Call) -> RemovableHandle:
    """Call ``call`` before each forward of ``module``, which copies of it will not, and return what removes it."""
    if module._compiled_call_impl is not None:
        return _CompiledFront(module, call)
    return module.register_forward_pre_hook(_Hook(call), prepend=True)


def after_forward(module: nn.Module, call: Call) -> RemovableHandle:
    """Call ``call`` after each forward of ``module`` that is not inside compiled code, and return what removes it."""
    return module.register_forward_hook(_Hook(call))


class _CompiledFront(RemovableHandle):
    """A wrapper of a module's compiled call, into which ``torch.compile`` has taken the module's own hooks."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        compiled = module._compiled_call_impl
        assert compiled is not None

        def in_front(*args: Any, **kwargs: Any) -> Any:
            call(module)
            return compiled(*args, **kwargs)

        self._module, self._compiled, self._in_front = module, compiled, in_front
        module._compiled_call_impl = in_front

    def remove(self) -> None:
        """Put the compiled call back, unless the module was compiled or wrapped again."""
        if self._module._compiled_call_impl is self._in_front:
            self._module._compiled_call_impl = self._compiled


class _Hook:
    """A hook that copies and pickles of the module do not get, and compiled code does not call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._call(module)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*_: object) -> None:
    """Do nothing, in place of a hook."""


def _no_hook() -> Callable[..., None]:
    return _nothing
