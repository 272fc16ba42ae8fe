"""Set up mixed precision: autocast, fp32 arithmetic and the loss scale."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from imagenet_fast.recipe import schema
from imagenet_fast.recipe.sync_table import Wire
from imagenet_fast.sync.all_reduce import wire_dtype


def effective_precision(precision: schema.Precision, bf16: bool) -> tuple[schema.Precision, str]:
    """Return the precision in which layers compute, and a line to print if it is not the recipe's.

    CPUs without instructions for bf16 compute in fp32, which holds every value of bf16: bf16 would take ten times as
    long. Gradients are sent in the recipe's wire dtype all the same. fp16 stays, with its overflows and loss scale.

    Args:
        precision: The recipe's precision.
        bf16: Whether all ranks have such instructions, as in ``DistContext``.
    """
    if precision.kind != "bf16" or bf16:
        return precision, ""
    note = "layers compute in fp32, not in bf16: a CPU or GPU of these ranks has no instructions for bf16\n"
    return schema.Unscaled(kind="fp32"), note


def autocast(precision: schema.Precision, device: torch.device) -> torch.autocast:
    """Return the context that forward and loss run in; weights and gradients stay fp32."""
    dtype = forward_dtype(precision)
    if dtype == torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype)


def forward_dtype(precision: schema.Precision) -> torch.dtype:
    """Return the dtype in which layers compute and in which the first layer gets images."""
    match precision.kind:
        case "fp32" | "tf32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case _:
            assert_never(precision.kind)


def set_float32_math(precision: schema.Precision) -> None:
    """Set how this process multiplies fp32 values: in full for ``fp32``, else in TF32 where a GPU has it."""
    full = precision.kind == "fp32"
    torch.set_float32_matmul_precision("highest" if full else "high")
    torch.backends.cudnn.allow_tf32 = not full


class LossScaler:
    """Loss scale that keeps small fp16 gradients from underflowing.

    The loss is multiplied by the scale, and the gradients are divided by it. The ``GradientSync`` finds whether a step
    is usable, alike on all ranks and before any weight is updated. The host reads nothing back: the result stays on the
    device, where the optimizer uses it. A dynamic scale starts at 2^16, halves at a non-finite gradient and doubles
    after 2000 steps without one (Micikevicius et al., arXiv 1710.03740). For other precisions the scale is 1.
    """

    def __init__(self, precision: schema.Precision, wire: Wire, device: torch.device) -> None:
        """Start at the fixed scale of ``precision``, or at 2^16.

        Args:
            precision: The recipe's precision; only fp16 has a scale.
            wire: Wire dtype of the gradients, which limits how large they can be.
            device: Device of the scale.
        """
        self._active = isinstance(precision, schema.Float16)
        fixed = precision.loss_scale if isinstance(precision, schema.Float16) else 1.0
        self.dynamic = not fixed
        """True if the scale changes from step to step."""
        self.scale = torch.full((), fixed or 2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int32, device=device)
        """Number of steps skipped in this run."""
        carried = wire_dtype(wire) if wire in ("fp32", "fp16") else torch.bfloat16  # codes have scales in bf16's range
        self.largest = torch.finfo(carried).max if self._active or wire == "fp16" else None
        """Largest usable gradient; None if gradients need no check."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the scale and its counters, on the device."""
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a value of ``state_dict``, the same on every rank."""
        self.scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self.skipped.copy_(state["skipped"])

    def metrics(self, scale: float, skipped: float) -> dict[str, float]:
        """Return what to log of the values of ``scale`` and ``skipped`` that the host has read.

        Values that are always 1 and 0 are left out.
        """
        if self.largest is None:
            return {}
        return {**({"loss_scale": scale} if self._active else {}), "skipped_steps": int(skipped)}

    def __call__(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the scale."""
        return loss * self.scale if self._active else loss

    def end_step(self, found_inf: Tensor | None) -> Tensor | None:
        """Return the scale of this step's gradients, and update it for the next step.

        Args:
            found_inf: 1 on the device if the step is not usable. None: gradients are not checked.

        Returns:
            What gradients are to be divided by: fp32 [] on the device, or None if they have no scale.

        Raises:
            AssertionError: The scale is dynamic and ``found_inf`` is None.
        """
        if found_inf is not None:
            self.skipped += found_inf.to(torch.int32)
        if not self._active:
            return None
        scale = self.scale.clone()
        if self.dynamic:
            assert found_inf is not None, "a dynamic scale needs to know of overflows"
            torch._amp_update_scale_(self.scale, self._good_steps, found_inf, 2.0, 0.5, 2000)
        return scale
