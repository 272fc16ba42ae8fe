"""Forwards that are traced into a program, in which an update that is put off must not become a part.

Whoever exports or traces a model between steps calls its forward, and so our hooks. What these would then do is
recorded, and every later call of the program would move the live weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

_REFUSED = "an update of this model is put off, which {} would make a part of its program; call pool.settle() before"


def settle_before_trace(settle: Callable[[], None], inputs: object) -> None:
    """Call ``settle`` if the forward that begins with ``inputs`` is traced, so that nothing of it is recorded.

    Raises RuntimeError where that is not possible. For torch.compile nothing happens: it runs the hooks every time.
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
    """Nothing that happens inside becomes a part of a program that is being traced, by anything but dynamo."""
    if torch.compiler.is_dynamo_compiling() or not _is_traced():
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
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
