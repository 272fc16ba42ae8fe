"""The least period of a step, against what a perfect order would do."""

from __future__ import annotations

import math
from random import Random

import pytest

from imagenet_fast.cost_model.layer_profile import Timing, random_profile
from imagenet_fast.cost_model.step_simulator import step_lower_bound

QUARTER = Timing(needed=(0.2, 0.1, 0.0), forward_s=0.25, ready=(0.25, 0.5, 0.75), backward_s=0.75)
"""Three layers in a second of compute, the last in forward first in the pool."""


def in_time(timing: Timing, seconds: list[float], period: float) -> bool:
    """Return whether the wire keeps a period if it always carries what is needed soonest: no order does better.

    A step's gradients are all due before the next backward begins, so steps do not meet on the wire.
    """
    releases = [timing.forward_s + ready for ready in timing.ready]
    deadlines = [period + needed for needed in timing.needed]
    left = list(seconds)
    now = min(releases)
    while any(left):
        ready = [n for n in range(len(left)) if left[n] and releases[n] <= now]
        coming = min((r for n, r in enumerate(releases) if left[n] and r > now), default=math.inf)
        if not ready:
            now = coming
            continue
        first = min(ready, key=lambda n: deadlines[n])
        carried = min(left[first], coming - now)
        now += carried
        left[first] = 0.0 if carried == left[first] else left[first] - carried
        if not left[first] and now > deadlines[first]:
            return False
    return period >= timing.compute_s


def course(random: Random, layers: int) -> tuple[Timing, list[float]]:
    forward, backward = ([random.uniform(0.01, 1) for _ in range(layers)] for _ in range(2))
    needed = tuple(reversed([sum(forward[:n]) for n in range(layers)]))
    ready = tuple(sum(backward[: n + 1]) for n in range(layers))
    seconds = [math.exp(random.gauss(-1, 1.5)) for _ in range(layers)]
    return Timing(needed, sum(forward), ready, sum(backward)), seconds


def test_a_perfect_order_keeps_it_and_nothing_shorter():
    random = Random(1)
    for layers in (1, 2, 3, 7, 20):
        for _ in range(10):
            timing, seconds = course(random, layers)
            least = step_lower_bound(timing, seconds, "read")
            assert in_time(timing, seconds, least * (1 + 1e-9))
            assert not in_time(timing, seconds, least * 0.999)


@pytest.mark.parametrize(
    ("awaits", "seconds", "share", "least"),
    [
        ("each", [0.1, 0.2, 0.2], 1.0, 1.5),
        ("each", [0.1, 0.2, 0.2], 0.5, 1.25),
        ("backward", [0.1, 0.1, 0.1], 1.0, 1.1),  # the first layer's gradient, after all compute
        ("backward", [2.0, 0.0, 0.0], 1.0, 2.5),  # the wire, from when the first gradient is there
        ("backward", [2.0, 0.0, 0.0], 0.5, 1.5),
        ("read", [0.1, 0.1, 0.0], 1.0, 1.0),
        ("read", [2.0, 0.0, 0.0], 1.0, 2.3),  # the same, awaited 0.2 later
        ("read", [0.0, 0.0, 0.5], 1.0, 1.5),  # ready last and needed first: nothing hides it
    ],
)
def test_what_bounds_a_step(awaits, seconds: list[float], share: float, least: float):
    assert step_lower_bound(QUARTER, seconds, awaits, share) == pytest.approx(least)


def test_it_lies_between_simpler_bounds_for_any_network():
    for seed in range(50):
        profile = random_profile(seed)
        raw = Random(seed).uniform(0.1, 3) * profile.compute_s
        seconds = profile.all_reduce_seconds(raw)
        each, backward, read = (
            step_lower_bound(profile.timing, seconds, awaits) for awaits in ("each", "backward", "read")
        )
        assert max(profile.compute_s, raw) <= read <= backward <= each == pytest.approx(profile.compute_s + raw)
