"""The loss scale of what an engine has left behind, which must be that of the gradients it is added to."""

from __future__ import annotations

import torch
from torch import Tensor

from imagenet_fast.sync.engine import SyncEngine


class ResidualScale:
    """Brings residuals to the loss scale of each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._follows: Tensor | None = None
        self._scale: Tensor | None = None  # of the residual
        self._ratio = 1.0  # by which it is to be multiplied

    def follow(self, scale: Tensor) -> None:
        """Read ``scale``, fp32 [] on the device, in every later step."""
        self._follows = scale

    def change(self, ratio: float) -> None:
        """The next steps have a loss scale that is ``ratio`` times as large."""
        self._ratio *= ratio

    def applies_to(self, engine: SyncEngine) -> bool:
        """Whether this step may have another scale than the engine's residual."""
        return engine.has_residual and (self._ratio != 1 or self._follows is not None)

    def apply(self, engine: SyncEngine) -> None:
        """Bring the engine's residual to this step's scale."""
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
        """The residual's scale, where there is one."""
        return None if self._scale is None else float(self._scale)

    def load(self, scale: float | None) -> None:
        """Continue from :meth:`state`'s value."""
        self._scale = None if scale is None else torch.full((), scale, device=self._device)
