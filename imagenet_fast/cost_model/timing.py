"""The course of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The course of a step by slot, in pool order; seconds, the same on every rank."""

    needed: tuple[float, ...]
    """Time from the beginning of forward until a slot's layer is called."""
    forward_s: float
    ready: tuple[float, ...]
    """Time from the beginning of backward until a slot is pushed."""
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s
