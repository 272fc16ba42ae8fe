"""The cost model: how long a step takes, from a step's course and what the network costs.

The wire is one resource that carries one message after the other. After the models of MG-WFBP (Shi et al., INFOCOM
2019), with the next forward added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from imagenet_fast.sync.link import Link
from imagenet_fast.sync.releases import Task, plan_releases
from imagenet_fast.sync.span import Span
from imagenet_fast.sync.timetable import Timing

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


def layerwise_step(spans: Sequence[Span], itemsize: int, timing: Timing, link: Link) -> float:
    """Seconds of a step with an all-reduce a layer, after backward, one after the other."""
    layers = [sum(span.stop - span.start for span in layer) for _, layer in groupby(spans, key=lambda s: s.layer)]
    return timing.compute_s + sum(link.seconds(elements * itemsize) for elements in layers)


def fused_step(
    messages: Sequence[float], timing: Timing, threshold: float, link: Link, first: float | None = None
) -> float:
    """Seconds of a step in which neighbouring gradients (bytes on the wire, in pool order) leave during backward.

    They leave together as soon as they come to ``threshold`` bytes, the first time to ``first``; what is left leaves
    after backward.
    """
    free = growing = 0.0
    enough = threshold if first is None else first
    for ready, message in zip(timing.ready, messages, strict=True):
        growing += message
        if growing >= enough:
            free = max(free, ready) + link.seconds(growing)
            growing, enough = 0.0, threshold
    if growing:
        free = max(free, timing.backward_s) + link.seconds(growing)
    return timing.forward_s + max(free, timing.backward_s)


def best_threshold(messages: Sequence[float], timing: Timing, link: Link) -> float:
    """The largest of :data:`THRESHOLDS` with a step within 1 % of the fastest, since the model leaves out what a
    launch costs the processor."""
    steps = {threshold: fused_step(messages, timing, threshold, link) for threshold in THRESHOLDS}
    return max(threshold for threshold, step_s in steps.items() if step_s <= 1.01 * min(steps.values()))


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
                free = max(free, turn + moment) + tasks[number].message * link.s_per_byte
                for span in carried[number]:
                    here[span] = max(here[span], free + link.latency_s)
        end = turn + timing.backward_s
        period, begin = end - begin, end
    return period
