"""Mixed precision: the autocast region and the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from imagenet_fast.recipe import schema
from imagenet_fast.recipe.engines import Wire
from imagenet_fast.training.optimizers import gradients


def autocast(precision: schema.Precision, device: torch.device) -> torch.autocast:
    """The context that forward and loss run in; weights and gradients stay fp32."""
    match precision:
        case schema.Full() | schema.TensorFloat():
            return torch.autocast(device.type, enabled=False)
        case schema.BFloat16():
            return torch.autocast(device.type, torch.bfloat16)
        case schema.Float16():
            return torch.autocast(device.type, torch.float16)
        case _:
            assert_never(precision)


def set_float32_math(precision: schema.Precision) -> None:
    """How products of fp32 values are made in this process: in full for ``fp32``, else in TF32 where a GPU has it."""
    full = isinstance(precision, schema.Full)
    torch.set_float32_matmul_precision("highest" if full else "high")
    torch.backends.cudnn.allow_tf32 = not full


class LossScale:
    """Keeps small fp16 gradients from vanishing: the loss is multiplied by it, the gradients divided.

    ``unscale`` looks at gradients after they have been averaged. A non-finite value on any rank has by then
    reached every rank, so all find the same and skip the same step, and nothing is read back by the host: the
    verdict stays on the device, where the optimiser consumes it. A dynamic scale starts at 2^16, halves at a
    non-finite gradient and doubles after 2000 steps without one (Micikevicius et al., arXiv 1710.03740).

    Other precisions have a scale of 1, and are looked at only when an fp16 wire could overflow.
    """

    def __init__(self, precision: schema.Precision, wire: Wire, device: torch.device) -> None:
        fixed = precision.loss_scale if isinstance(precision, schema.Float16) else 1.0
        self._active = isinstance(precision, schema.Float16) or wire == "fp16"
        self._dynamic = not fixed
        self.scale = torch.full((), fixed or 2.0**16, device=device)
        self._found_inf = torch.zeros((), device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self._active else loss

    def unscale(self, params: Sequence[Tensor]) -> Tensor | None:
        """Divide the gradients by the scale. Returns 1 on the device where one is not finite, else 0."""
        if not self._active:
            return None
        self._found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients(params), self._found_inf, self.scale.reciprocal())
        if self._dynamic:
            torch._amp_update_scale_(self.scale, self._good_steps, self._found_inf, 2.0, 0.5, 2000)
        return self._found_inf
