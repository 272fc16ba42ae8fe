"""Count on the device for how many steps in a row a loss has not been finite."""

from __future__ import annotations

import torch
from torch import Tensor


class NonFiniteLoss(Exception):
    """Losses or weights are not finite, so continuing is useless; raised on all ranks alike."""


class NonFiniteCounter:
    """Number of steps in a row, up to the last one, whose loss on this rank was infinite or NaN."""

    def __init__(self, device: torch.device) -> None:
        """Start at 0, on ``device``."""
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        """The count, int32 [], on the device."""

    def add(self, loss: Tensor) -> None:
        """Add the loss of one more step; the host reads nothing back."""
        self.steps.add_(1).mul_(loss - loss != 0)

    def __int__(self) -> int:
        """Return the count; waits for the device."""
        return int(self.steps)
