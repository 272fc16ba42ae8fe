"""The placeholder in ``p.grad`` while a gradient is being sent: it must not be read or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_METADATA = frozenset({
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "requires_grad", "grad_fn",
        "is_leaf", "ndim", "grad", "nbytes", "itemsize",
    )),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.data_ptr, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.nelement,
})  # fmt: skip
"""The functions that are allowed: they do not depend on values."""


_ZEROING = frozenset({Tensor.zero_, Tensor.requires_grad_, torch._foreach_zero_})
"""The functions that ``zero_grad(set_to_none=False)`` of an optimizer or a module calls."""


class PendingGrad(Tensor):
    """A placeholder for a gradient between backward and ``pool.finish()``.

    Any use except of its metadata (shape, dtype, ...) raises RuntimeError. Zeroing only sets ``zeroed``; the pool
    zeroes the gradient once it has been received.

    With DDP, ``p.grad`` holds means at this time. Here messages may still be in flight: a read would give neither the
    local gradient nor the mean, and a write might reach some ranks and not others.
    """

    zeroed = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata, record zeroing, and raise RuntimeError for everything else."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in _ZEROING:
            if func is not Tensor.requires_grad_:
                for grad in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                    grad.__dict__["zeroed"] = True
            return args[0]
        if func is Tensor.__repr__:
            return "PendingGrad(on its way to the other ranks)"
        raise RuntimeError(
            "a gradient was used while it is on its way to the other ranks; call pool.finish() after backward, before "
            "gradients are read, clipped, unscaled or applied"
        )
