"""Hooks around a module's forward that stay outside of compiled code, and that copies and pickles do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

Call = Callable[[nn.Module], None]


def fronts(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return, by module, the one whose call is seen: the outermost compiled or scripted one around it, or itself."""
    found: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, outer: nn.Module | None) -> None:
        if outer is None and (is_compiled(module) or isinstance(module, ScriptModule)):
            outer = module
        found.setdefault(module, module if outer is None else outer)  # the truth of a module may be its length
        for child in module.children():
            visit(child, outer)

    visit(model, None)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module is what ``torch.compile`` returns, or was compiled by its method."""
    call = module._compiled_call_impl
    return hasattr(module, "_orig_mod") or (call.own if isinstance(call, _Call) else call) is not None


class ForwardHook:
    """A hook in front of each forward of a module, or behind it, that is not inside compiled code."""

    def __init__(self, module: nn.Module, call: Call, behind: bool = False) -> None:
        """Call ``call`` with the module before each of its forwards; ``behind``: after each."""
        around = module._compiled_call_impl
        self._around = around if isinstance(around, _Call) else _Call(module)
        self._calls = self._around.behind if behind else self._around.in_front
        self._calls.append(call)
        self._call = call

    def remove(self) -> None:
        """Remove the hook, and with the last one of the module all that was attached to it."""
        if self._call in self._calls:
            self._calls.remove(self._call)
        self._around.detach()


class _Call:
    """A module's call with its hooks, in the place of a compiled call: no part of the module's state, nor of a graph.

    Hooks of torch's own would be copied, pickled and scripted with the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.own: Callable[..., Any] | None = module._compiled_call_impl
        self.in_front: list[Call] = []
        self.behind: list[Call] = []
        vars(module)["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Callable[..., Any] = self._module._call_impl if self.own is None else self.own
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        for call in self.in_front:
            call(self._module)
        outputs = own(*args, **kwargs)
        for call in self.behind:
            call(self._module)
        return outputs

    def __reduce__(self) -> Any:
        """Leave nothing of it in copies of a module that copies its attributes itself, as of torch.fx."""
        return type(None), ()

    def detach(self) -> None:
        """Leave the module as it was, if no hook is left and it was not compiled again."""
        if not self.in_front and not self.behind and self._module._compiled_call_impl is self:
            if self.own is None:
                del vars(self._module)["_compiled_call_impl"]
            else:
                vars(self._module)["_compiled_call_impl"] = self.own
