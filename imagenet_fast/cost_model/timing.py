"""A step's course."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A step's course by span, in pool order; seconds, the same on every rank."""

    needed: tuple[float, ...]
    """From the beginning of forward until a span's layer is called."""
    forward_s: float
    ready: tuple[float, ...]
    """From the beginning of backward until a span is pushed."""
    backward_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s
