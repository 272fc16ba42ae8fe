"""For how many steps in a row a loss has not been finite, counted on the device that computes it."""

from __future__ import annotations

import torch
from torch import Tensor


class NonFiniteLoss(Exception):
    """The numbers have gone wrong, and there is no use in going on. Raised on all ranks alike."""


class NonFiniteCounter:
    """Steps in a row, up to the last one, whose loss on this rank was infinite or no number."""

    def __init__(self, device: torch.device) -> None:
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        """On the device."""

    def add(self, loss: Tensor) -> None:
        """The loss of one more step. Nothing is read back by the host."""
        self.steps.add_(1).mul_(loss - loss != 0)

    def __int__(self) -> int:
        """Waits for the device."""
        return int(self.steps)
