"""Batch norm with the add and the ReLU around it, which the kernels of ``norm_kernels`` do in the norm's own passes.

Without them, and in evaluation, it is torch's norm, an add and a ReLU, one after the other.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast.errors import first_line

Relu = Literal["none", "before", "after"]
"""Where a norm applies ReLU: nowhere, to its input, or to its output."""
Images = Tensor | tuple[Tensor, Tensor]
"""Images [N, C, H, W], or the same twice."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with an add and a ReLU, under the same names of weights and statistics."""

    fused = False
    """True if kernels compute the norm in training; torch computes that of an input which they cannot take."""
    forks = False
    """True if kernels return a sum twice, for the next block and its shortcut, and add the gradients of the two."""

    def __init__(self, num_features: int, relu: Relu = "none", **options: Any) -> None:
        """Create the norm with torch's ``options``; ``relu`` says where it applies one."""
        super().__init__(num_features, **options)
        self.relu: Relu = relu

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Images:  # type: ignore[override]
        """Return relu(norm(input) + residual) or norm(relu(input)), for images; only the former has a residual."""
        fits = self.fused and self.training and input.dtype in _DTYPES and input.numel() > input.size(1)
        if fits and input.is_contiguous(memory_format=torch.channels_last):
            from imagenet_fast.models.norm_kernels import FusedNorm  # late, since not every node has Triton

            if self.affine:
                for param in (self.weight, self.bias):
                    param.detach()  # kernels read memory: an update that an engine has put off is carried out before
            output: Images = FusedNorm.apply(input, residual, self.weight, self.bias, self)
            return output
        normalised: Tensor = super().forward(F.relu(input) if self.relu == "before" else input)
        if residual is not None:
            normalised += residual
        return F.relu(normalised, inplace=True) if self.relu == "after" else normalised


@cache
def unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why kernels cannot compute norms in ``dtype`` on ``device``, as the end of a sentence; empty if they can.

    The first call compares a norm with torch's. In it no sum is so near 0 that rounding decides its sign.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU"
    values = torch.randn(3, 4, 64, 8, 8, generator=torch.Generator("cpu").manual_seed(0), device="cpu").clamp(-2, 2)
    values[1] = 3 * values[1].sign()
    x, r, dy = (value.to(device, dtype, memory_format=torch.channels_last).requires_grad_() for value in values)
    norm, found = FusedBatchNorm2d(64, relu="after").to(device), []
    try:
        for norm.fused in (False, True):
            y = norm(x, r)
            found.append([y, *torch.autograd.grad(y, [x, r, *norm.parameters()], dy)])
    except Exception as error:  # no Triton, or what its compiler, the driver or a cache directory raises
        return f"a first one fails ({first_line(error)})"
    close = all((ours - torchs).norm() <= 0.02 * torchs.norm() for torchs, ours in zip(*found, strict=True))
    return "" if close else "a first one differs from torch's"
