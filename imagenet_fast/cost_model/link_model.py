"""What a message costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkModel:
    """An all-reduce of n bytes takes ``latency_s`` + n ``s_per_byte``, with nothing else on the wire."""

    latency_s: float
    s_per_byte: float
    call_s: float = 0.0
    """How long a message keeps the processor, however short: the latencies of many overlap, these do not."""

    def seconds(self, message: float) -> float:
        return self.latency_s + message * self.s_per_byte


@dataclass(frozen=True)
class CodecCost:
    """How long the processor works on the codes of a message, by its bytes on the wire."""

    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    """Of both phases: where parts are added up, and where means arrive."""


NO_CODEC = CodecCost()
"""Of values that are cast: a link shows what that costs."""
