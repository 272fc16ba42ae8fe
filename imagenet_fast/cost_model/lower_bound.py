"""The least time of a step, whatever the engine: no order and no overlap can beat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

from imagenet_fast.cost_model.layer_profile import Timing


def step_lower_bound(
    timing: Timing, seconds: Sequence[float], awaits: Literal["each", "backward", "read"], share: float = 1.0
) -> float:
    """Return the seconds of the fastest possible step.

    Consider the gradients that are ready no earlier than ``a``, from the beginning of backward, and needed no later
    than ``d``, from the beginning of the next forward. They must be sent between the two. With a step time ``T`` and a
    forward time ``f``, that leaves ``T - f - a + d``. For gradients that may be divided at will, the largest of these
    bounds is the least step time. With ``backward``, all gradients are needed by ``d = 0``. With ``each``, nothing is
    sent before backward has ended.

    Args:
        timing: The course of the step.
        seconds: Time for which each slot's gradients keep the wire busy; in total, one undisturbed all-reduce of all.
        awaits: Where the engine waits for gradients.
        share: Share of the values that the engine sends.
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
