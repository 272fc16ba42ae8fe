"""The cost of a message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkModel:
    """A link on which an all-reduce of n bytes, alone on the wire, takes ``latency_s`` + n * ``s_per_byte`` seconds."""

    latency_s: float
    s_per_byte: float
    call_s: float = 0.0
    """Seconds that a message keeps the processor, however short. Latencies of messages overlap, these do not."""

    def seconds(self, message: float) -> float:
        """Return the seconds of a message of ``message`` bytes, alone on the wire."""
        return self.latency_s + message * self.s_per_byte


@dataclass(frozen=True)
class CodecCost:
    """The processor's time for the codes of a message, per byte on the wire."""

    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    """Time for both decodings: where parts are added up, and where means are received."""


NO_CODEC = CodecCost()
"""The cost for values that are only cast: the link's costs include the cast."""
