"""The loss scale of an engine's residual, which must match that of the gradients it is added to."""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.engine import SyncEngine


class ResidualScale:
    """The loss scale of a residual, adjusted to that of each step."""

    def __init__(self, device: torch.device) -> None:
        """Start with a loss scale that does not change."""
        self._device = device
        self._follows: Tensor | None = None
        self._scale: Tensor | None = None  # the residual's scale
        self._ratio = 1.0  # the factor still to be applied to the residual

    def follow(self, scale: Tensor) -> None:
        """Read the loss scale from ``scale``, an fp32 scalar tensor on the device, in every later step."""
        self._follows = scale

    def change(self, ratio: float) -> None:
        """Record that the loss scale of the next steps is ``ratio`` times as large."""
        self._ratio *= ratio

    def applies_to(self, engine: SyncEngine) -> bool:
        """Return whether this step's loss scale may differ from that of the engine's residual."""
        return engine.has_residual and (self._ratio != 1 or self._follows is not None)

    def apply(self, engine: SyncEngine) -> None:
        """Rescale the engine's residual to this step's loss scale."""
        if not engine.has_residual:
            return
        if self._ratio != 1:
            engine.scale_residual(torch.full((), self._ratio, device=self._device))
            self._ratio = 1.0
        if self._follows is not None:
            if self._scale is not None:
                engine.scale_residual(self._follows / self._scale)
            self._scale = self._follows.clone()

    def state(self) -> float | None:
        """Return the residual's loss scale, or None if none has been applied to it yet."""
        return None if self._scale is None else float(self._scale)

    def load(self, scale: float | None) -> None:
        """Continue from a value of ``state``."""
        self._scale = None if scale is None else torch.full((), scale, device=self._device)
