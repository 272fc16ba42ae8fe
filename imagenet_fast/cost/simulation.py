"""The cost model: how long a step takes, from its course, what travels in it, and what the network costs.

The processor prepares one message after the other, and the wire carries them in that order; what a message waits for
besides, its latency, overlaps the next ones' bytes. After the models of MG-WFBP (Shi et al., INFOCOM 2019), with the
next forward, plans and codecs added.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from imagenet_fast.cost.link import NO_CODEC, CodecCost, Link
from imagenet_fast.cost.releases import Task
from imagenet_fast.cost.timing import Timing

THRESHOLDS = [*(2.0**power for power in range(16, 27)), math.inf]
"""Bytes: 64 KiB to 64 MiB, and everything at once."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model makes of an engine."""

    engine: str
    step_s: float
    exact: bool
    chosen: bool


@dataclass(frozen=True)
class Sending:
    """A message of a step, or a half of one."""

    task: Task
    """From when on it may leave, its bytes, and of which other it is the second half."""
    spans: range
    """Whose gradients, by number in pool order, are complete once it and its like have come."""
    link: Link
    codec: CodecCost = NO_CODEC
    urgent: bool = False
    """Whether what is released with it at the end of backward, but is not urgent, waits until it has come."""
    run: int = 0
    """Messages of one run are pieces of what travels together."""
    queue: str | None = None
    """Messages of one queue leave one by one, each when the one before it has come."""


def simulated_step_s(
    sendings: Sequence[Sending],
    releases: Sequence[Sequence[int]],
    awaits: Literal["each", "backward", "read"],
    timing: Timing,
) -> float:
    """Seconds of a step that sends ``sendings``, those of ``releases`` by event: a push each, and backward's end.

    With ``read`` the next forward stands still at every layer whose gradients have not come, else where it begins. So
    all of a step has come before the next backward: steps do not meet on the wire, and each is like the first.
    """
    moments = [*timing.ready, timing.backward_s]
    came = _came(sendings, releases, awaits == "each", moments)
    late = 0.0
    for sending, moment in zip(sendings, came, strict=True):
        needed = min(timing.needed[span] for span in sending.spans) if awaits == "read" else 0.0
        late = max(late, moment - timing.backward_s - needed)
    return timing.compute_s + late


def _came(
    sendings: Sequence[Sending], releases: Sequence[Sequence[int]], one_by_one: bool, moments: Sequence[float]
) -> list[float]:
    """When each message has come, from the beginning of backward; ``one_by_one``: no run leaves before the last has."""
    behind = _behind(sendings, releases, one_by_one)
    awaited = [len(others) for others in behind]
    following: list[list[int]] = [[] for _ in sendings]
    for number, others in enumerate(behind):
        for other in others:
            following[other].append(number)
    order = {number: place for place, number in enumerate(n for released in releases for n in released)}
    earliest = [0.0] * len(sendings)
    for moment, released in zip(moments, releases, strict=True):
        for number in released:
            earliest[number] = moment
    ready = [(earliest[number], order[number], number) for number in order if not awaited[number]]
    heapq.heapify(ready)
    came = [0.0] * len(sendings)
    processor = wire = 0.0
    while ready:
        begin, _, number = heapq.heappop(ready)
        sending = sendings[number]
        size, link, codec = sending.task.message, sending.link, sending.codec
        encoded = max(begin, processor) + size * codec.encode_s_per_byte
        processor = encoded + link.call_s + size * codec.decode_s_per_byte
        wire = max(wire, encoded) + size * link.s_per_byte
        came[number] = max(wire, encoded + link.call_s) + link.latency_s + size * codec.decode_s_per_byte
        for other in following[number]:
            awaited[other] -= 1
            earliest[other] = max(earliest[other], came[number])
            if not awaited[other]:
                heapq.heappush(ready, (earliest[other], order[other], other))
    return came


def _behind(sendings: Sequence[Sending], releases: Sequence[Sequence[int]], one_by_one: bool) -> list[list[int]]:
    """By message, those that must have come before it leaves."""
    behind: list[list[int]] = [[] for _ in sendings]
    run: list[int] = []
    before: list[int] = []  # the run before it
    urgent: list[int] = []  # the last of these
    queues: dict[str, int] = {}  # the last of each
    for event, released in enumerate(releases):
        for number in released:
            sending = sendings[number]
            if sending.task.after is not None:
                behind[number].append(sending.task.after)
            if sending.queue is not None:
                if sending.queue in queues:
                    behind[number].append(queues[sending.queue])
                queues[sending.queue] = number
            if one_by_one:
                if run and sending.run != sendings[run[0]].run:
                    before, run = run, []
                run.append(number)
                behind[number] += before
            if sending.urgent and event == len(releases) - 1:
                urgent = [number]
            elif not sending.urgent:
                behind[number] += urgent
    return behind
