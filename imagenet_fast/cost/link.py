"""What a message costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes takes ``latency_s`` + n ``s_per_byte``, with nothing else on the wire."""

    latency_s: float
    s_per_byte: float
    call_s: float = 0.0
    """What a message costs at least, however short: it can't be hidden behind another."""

    def seconds(self, message: float) -> float:
        return self.latency_s + message * self.s_per_byte
