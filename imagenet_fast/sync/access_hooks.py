"""Bring a model up to date before code outside its forward reads, copies, pickles, traces or exports it.

A deferring engine leaves updates pending between a step and the next forward. Code that calls ``parameters()``,
``apply()``, ``train()``, ``eval()`` or ``to()`` in between, or copies or pickles the model, must not see old weights.
Copies and pickles have none of our hooks.

Exporting or tracing a model calls its forward, and with it the hooks that carry out deferred updates. These updates
would be recorded, and every later call of the program would change the live weights.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

_REFUSED = "an update of this model is put off, which {} would make a part of its program; call pool.settle() before"


class Hook:
    """A hook that copies and pickles of the model do not get."""

    def __init__(self, call: Callable[..., None]) -> None:
        """Wrap the function ``call``."""
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Call the function, and return None."""
        self._call(*arguments)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        """Return a function that does nothing."""
        return _no_hook

    def __reduce__(self) -> Any:
        """Return what unpickles as a function that does nothing."""
        return _left_out, ()


def weak_hook(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook that calls a bound method as long as its object lives.

    Python's garbage collector does not see the hooks that autograd keeps, so a hook on a parameter must not keep the
    model alive.
    """
    known = weakref.WeakMethod(method)

    def call(value: Any) -> None:
        alive = known()
        if alive is not None:
            alive(value)

    return call


class Pending(NamedTuple):
    """Functions that apply the pending updates of a model."""

    settle: Callable[[], None]
    """Applies all of them."""
    settle_one: Callable[[nn.Parameter], None]
    """Applies that of one parameter."""
    inside: Callable[[], bool]
    """Returns whether this thread is in the model's forward.

    There layers are updated one by one, and ``parameters()``, which many models call to learn their dtype, updates a
    parameter when it is taken from there.
    """


def settle_before_access(module: nn.Module, pending: Pending) -> None:
    """Apply pending updates before ``module`` is read, converted, copied or pickled.

    Args:
        module: Its own methods are replaced on the instance. Children need a call of their own.
        pending: The updates.
    """
    known = _settling(module)
    (known or _Settling(module)).owners.append(pending)


def remove_copy_hook(module: nn.Module, settle: Callable[[], None]) -> None:
    """Undo ``settle_before_access``."""
    known = _settling(module)
    assert known is not None
    known.owners = [owner for owner in known.owners if owner.settle != settle]
    if not known.owners:
        known.leave()


class _Settling:
    """The replaced methods of one module; methods that were set on the instance before are called, and restored.

    ``eval`` calls ``train``; ``to``, ``half`` and ``cuda`` call ``_apply``; pickle calls ``__getstate__``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.owners: list[Pending] = []
        self.enter()

    def enter(self) -> None:
        own = vars(self._module)
        self._ours: dict[str, Callable[..., Any]] = {  # methods, not partials: torch.compile asks for their functions
            "parameters": self._parameters, "named_parameters": self._named_parameters,
            "apply": self._visit,
            "train": self._train, "_apply": self._apply, "__deepcopy__": self._copy, "__getstate__": self._state,
        }  # fmt: skip
        self._before = {name: own[name] for name in self._ours if name in own}
        own.update(self._ours)

    def leave(self) -> None:
        own = vars(self._module)
        for name, method in self._ours.items():
            if own.get(name) is method:
                del own[name]
                if name in self._before:
                    own[name] = self._before[name]

    def _settle(self) -> None:
        for owner in self.owners:
            owner.settle()

    def _parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("parameters", *args, **kwargs)

    def _named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("named_parameters", *args, **kwargs)

    def _visit(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("apply", *args, **kwargs)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return self._call("train", *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return self._call("_apply", *args, **kwargs)

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        inner = []
        if not torch.compiler.is_compiling():
            for owner in self.owners:
                if owner.inside():
                    inner.append(owner.settle_one)
                else:
                    owner.settle()
        found = self._call(name, *args, **kwargs)
        return _each_settled(found, inner) if inner and "parameters" in name else found

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self._before:
            return self._before[name](*args, **kwargs)
        return getattr(type(self._module), name)(self._module, *args, **kwargs)

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        self._settle()
        self.leave()
        try:
            return copy.deepcopy(self._module, memo)
        finally:
            self.enter()

    def _state(self) -> Any:
        self._settle()
        state = type(self._module).__getstate__(self._module)
        return {name: value for name, value in state.items() if self._ours.get(name) is not value} | self._before


def _each_settled(found: Iterable[Any], settles: Sequence[Callable[[nn.Parameter], None]]) -> Iterator[Any]:
    """Yield parameters, or names and parameters, each after its pending update."""
    for item in found:
        for settle_one in settles:
            settle_one(item[1] if isinstance(item, tuple) else item)
        yield item


def _settling(module: nn.Module) -> _Settling | None:
    method = vars(module).get("__deepcopy__")
    known = getattr(method, "__self__", None)
    return known if isinstance(known, _Settling) else None


def _no_hook(*_: object) -> None:
    """Do nothing, in place of a hook."""


def _left_out() -> Callable[..., None]:
    return _no_hook


def settle_before_trace(settle: Callable[[], None], inputs: object) -> None:
    """Call ``settle`` if the forward that is about to begin is traced, so that no update is recorded.

    Do nothing for torch.compile, which runs the hooks at every call.

    Args:
        settle: Carries out the deferred updates, outside of the trace.
        inputs: The inputs of the forward. Fake tensors among them are a sign of tracing.

    Raises:
        RuntimeError: The forward is traced by torch.export or captured in a CUDA graph: updates cannot be kept out.
    """
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            raise RuntimeError(_REFUSED.format("torch.export"))
    elif torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(_REFUSED.format("a CUDA graph"))
    elif _is_traced() or (isinstance(inputs, tuple) and any(isinstance(value, FakeTensor) for value in inputs)):
        settle()


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """Suspend tracing inside the context, except by dynamo, so that nothing in it is recorded."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # in torch.func.grad, jvp, vmap and the like
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            yield
        return
    if not _is_traced():
        yield
        return
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # torch has not typed it
    try:
        with _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # torch has not typed it


def _is_traced() -> bool:
    """Return whether torch.export, torch.jit.trace, make_fx or a fake-tensor mode is active."""
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
