"""The least that a step can take, whatever the engine: what no order and no overlap can beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

from imagenet_fast.cost_model.timing import Timing


def step_lower_bound(
    timing: Timing, seconds: Sequence[float], awaits: Literal["each", "backward", "read"], share: float = 1.0
) -> float:
    """Seconds of the fastest step, of an engine that waits where ``awaits`` says and sends ``share`` of the values.

    ``seconds`` is how long each span's gradients keep the wire busy: together one undisturbed all-reduce of all. Those
    that are ready no earlier than a, from the beginning of backward, and needed no later than d, from the beginning of
    the next forward, must pass between the two, for which a period T with a forward of f leaves T - f - a + d. For
    gradients that may be divided at will the largest of these bounds is the least period. ``backward``: all are needed
    by d = 0. ``each``: nothing is sent before backward has ended.
    """
    match awaits:
        case "each":
            return timing.compute_s + share * sum(seconds)
        case "backward":
            needed: Sequence[float] = [0.0] * len(seconds)
        case "read":
            needed = timing.needed
        case _:
            assert_never(awaits)
    spans = list(zip(timing.ready, needed, seconds, strict=True))
    bounds = (
        timing.forward_s + a - d + share * sum(s for ready, need, s in spans if ready >= a and need <= d)
        for a in timing.ready
        for d in set(needed)
    )
    return max(timing.compute_s, *bounds)
