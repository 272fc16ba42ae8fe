"""Copies and pickles of a model that is being trained: they are up to date, and free of what watches the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

_NAMES = ("__deepcopy__", "__getstate__")  # the latter is asked for by pickle


class Hook:
    """A hook of this model, which a copy or a pickle of the model does without."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return _left_out, ()


def settle_before_copies(module: nn.Module, settle: Callable[[], None]) -> None:
    """Have whoever copies or pickles ``module`` call ``settle`` first."""
    known = getattr(vars(module).get(_NAMES[0]), "__self__", None)
    (known if isinstance(known, _Settling) else _Settling(module)).settles.append(settle)


def settle_no_longer(module: nn.Module, settle: Callable[[], None]) -> None:
    """Undo :func:`settle_before_copies`."""
    known = getattr(vars(module).get(_NAMES[0]), "__self__", None)
    assert isinstance(known, _Settling)
    known.settles.remove(settle)
    if not known.settles:
        known.leave()


class _Settling:
    """Takes the place of how a module is copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.settles: list[Callable[[], None]] = []
        self._enter()

    def leave(self) -> None:
        for name in _NAMES:
            del vars(self._module)[name]

    def _enter(self) -> None:
        vars(self._module).update(zip(_NAMES, (self._copy, self._state), strict=True))

    def _settle(self) -> None:
        for settle in self.settles:
            settle()

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        self._settle()
        self.leave()
        try:
            return copy.deepcopy(self._module, memo)
        finally:
            self._enter()

    def _state(self) -> Any:
        self._settle()
        state = type(self._module).__getstate__(self._module)
        return {name: value for name, value in state.items() if name not in _NAMES}


def _no_hook(*_: object) -> None:
    """In the place of a hook."""


def _left_out() -> Callable[..., None]:
    return _no_hook
