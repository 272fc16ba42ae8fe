"""The cost model: how long a step takes, from a step's course and what the network costs.

The wire is one resource that carries one message after the other. After the models of MG-WFBP (Shi et al., INFOCOM
2019), with the next forward added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imagenet_fast.cost.link import Link
from imagenet_fast.cost.releases import Task, plan_releases
from imagenet_fast.cost.timing import Timing

_CYCLES = 6  # simulated steps, after which one is like the next
THRESHOLDS = [*(2.0**power for power in range(16, 27)), math.inf]
"""Bytes: 64 KiB to 64 MiB, and everything at once."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model makes of an engine."""

    engine: str
    step_s: float
    exact: bool
    chosen: bool


def serial_step(messages: Iterable[float], timing: Timing, link: Link) -> float:
    """Seconds of a step whose messages (bytes on the wire) leave after backward, one after the other."""
    return timing.compute_s + sum(map(link.seconds, messages))


def fused_step(messages: Iterable[tuple[int, float]], timing: Timing, link: Link) -> float:
    """Seconds of a step whose messages leave during backward, one after the other, and are awaited at its end.

    Each is given by the span with which it is ready (as a number in pool order) and its bytes on the wire.
    """
    free = 0.0
    for event, message in messages:
        free = max(free, timing.ready[event]) + link.seconds(message)
    return timing.forward_s + max(free, timing.backward_s)


def deferred_step(tasks: Sequence[Task], carried: Sequence[range], timing: Timing, link: Link) -> float:
    """Seconds of a step whose transfers overlap the next forward.

    ``carried`` gives, by task, the spans (as numbers in pool order) that are complete once it and its like are.
    """
    releases = plan_releases(tasks, [*timing.ready, timing.backward_s], link.s_per_byte)
    here = [0.0] * len(timing.needed)  # when a span's gradients had come, on the clock of the simulation
    begin = free = period = 0.0
    for _ in range(_CYCLES):
        late = 0.0
        for span in sorted(range(len(here)), key=timing.needed.__getitem__):
            late = max(late, here[span] - begin - timing.needed[span])
        turn = begin + timing.forward_s + late
        here = [0.0] * len(here)
        for moment, released in zip([*timing.ready, timing.backward_s], releases, strict=True):
            for number in released:
                free = max(free, turn + moment) + max(link.call_s, tasks[number].message * link.s_per_byte)
                for span in carried[number]:
                    here[span] = max(here[span], free + link.latency_s)
        end = turn + timing.backward_s
        period, begin = end - begin, end
    return period
