"""Mixed precision: the autocast region and the loss scale."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from imagenet_fast.recipe import schema
from imagenet_fast.recipe.sync_config import Wire
from imagenet_fast.sync import wire_dtype


def autocast(precision: schema.Precision, device: torch.device) -> torch.autocast:
    """The context that forward and loss run in; weights and gradients stay fp32."""
    dtype = forward_dtype(precision)
    if dtype == torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype)


def forward_dtype(precision: schema.Precision) -> torch.dtype:
    """In which layers compute, and images are given to the first of them."""
    match precision:
        case schema.Full() | schema.TensorFloat():
            return torch.float32
        case schema.BFloat16():
            return torch.bfloat16
        case schema.Float16():
            return torch.float16
        case _:
            assert_never(precision)


def set_float32_math(precision: schema.Precision) -> None:
    """How products of fp32 values are made in this process: in full for ``fp32``, else in TF32 where a GPU has it."""
    full = isinstance(precision, schema.Full)
    torch.set_float32_matmul_precision("highest" if full else "high")
    torch.backends.cudnn.allow_tf32 = not full


class LossScaler:
    """Keeps small fp16 gradients from vanishing: the loss is multiplied by it, the gradients divided.

    Whether a step can be used is found by the gradients' synchroniser, alike on all ranks and before any weight is
    updated; nothing is read back by the host: the verdict stays on the device, where the optimiser consumes it. A
    dynamic scale starts at 2^16, halves at a non-finite gradient and doubles after 2000 steps without one
    (Micikevicius et al., arXiv 1710.03740). Other precisions have a scale of 1.
    """

    def __init__(self, precision: schema.Precision, wire: Wire, device: torch.device) -> None:
        self._active = isinstance(precision, schema.Float16)
        fixed = precision.loss_scale if isinstance(precision, schema.Float16) else 1.0
        self.dynamic = not fixed
        """Whether it changes from step to step."""
        self.scale = torch.full((), fixed or 2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), dtype=torch.int32, device=device)
        carried = wire_dtype(wire) if wire in ("fp32", "fp16") else torch.bfloat16  # codes have scales of that range
        self.largest = torch.finfo(carried).max if self._active or wire == "fp16" else None
        """The largest gradient that can be used; None: they need not be looked at."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`'s value, the same on every rank."""
        self.scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self._skipped.copy_(state.get("skipped", torch.zeros_like(self._skipped)))  # not counted at first

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """The scale, and how many steps of the run were skipped; on the device."""
        return self.scale, self._skipped

    def told(self, scale: float, skipped: float) -> dict[str, float]:
        """Of :attr:`state`, as the host has read it, what can be anything else than 1 and 0."""
        if self.largest is None:
            return {}
        return {**({"loss_scale": scale} if self._active else {}), "skipped_steps": int(skipped)}

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self._active else loss

    def end_step(self, found_inf: Tensor | None) -> Tensor | None:
        """What this step's gradients are to be multiplied by, None for nothing; the next step's scale may be another.

        ``found_inf`` is 1 on the device where the step cannot be used; None: gradients are not looked at.
        """
        if found_inf is not None:
            self._skipped += found_inf.to(torch.int32)
        if not self._active:
            return None
        factor = self.scale.reciprocal()
        if self.dynamic:
            assert found_inf is not None, "a dynamic scale needs to know of overflows"
            torch._amp_update_scale_(self.scale, self._good_steps, found_inf, 2.0, 0.5, 2000)
        return factor
