"""Guards that keep deferred updates out of traced and exported programs.

Exporting or tracing a model between steps calls its forward, and with it the hooks that carry out deferred updates.
These updates would be recorded, and every later call of the program would change the live weights.
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
    """Return whether torch.export, torch.jit.trace, make_fx or a fake-tensor mode is active."""
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )
