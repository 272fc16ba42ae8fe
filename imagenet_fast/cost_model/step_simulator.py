"""The cost model: the time of a step, from its course, its messages and the costs of the network; and the least time.

Queues share the wire evenly, as their connections do, and the messages of a queue pass one after the other. A message's
latency overlaps with other messages' bytes. The processor prepares one message after the other. After the models of
MG-WFBP (Shi et al., INFOCOM 2019), with the next forward, plans, queues and codecs added.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.priority_schedule import Task
from imagenet_fast.recipe.sync_table import Awaits

THRESHOLDS = [*(2.0**power for power in range(16, 27)), math.inf]
"""Bucket sizes in bytes: 64 KiB to 64 MiB, and infinity for everything at once."""

_RECEIVED, _RELEASED, _BEGUN = range(3)
"""Kinds of events; at equal times, those that unblock others are handled first."""


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


@dataclass(frozen=True)
class Prediction:
    """The cost model's result for an engine."""

    engine: str
    step_s: float
    exact: bool
    chosen: bool


@dataclass(frozen=True)
class SimMessage:
    """A message of a step, or a half of one."""

    task: Task
    """When it may be launched, and its bytes."""
    slots: range
    """Slots, by number in pool order, that are complete once it and their other messages are received."""
    link: LinkModel
    waits: Sequence[int] = ()
    """Numbers of the messages that must be received before it is sent."""
    codec: CodecCost = NO_CODEC
    queue: str = ""
    """Name of its queue, such as a process group; messages of one queue are launched, and pass, in their order."""
    abreast: float = math.inf
    """Number of messages of its queue that may be in flight at a time."""


def simulated_step_s(
    messages: Sequence[SimMessage], releases: Sequence[Sequence[int]], awaits: Awaits, timing: Timing
) -> float:
    """Return the seconds of a step that sends ``messages``.

    With ``read`` the next forward stops at every layer whose gradients are not received yet; otherwise it stops at its
    beginning. So all messages of a step are received before the next backward. Steps do not share the wire, and each is
    like the first.

    Args:
        messages: The messages of a step.
        releases: Numbers of the messages that are released at each event: one per push, then the end of backward.
        awaits: Where the step waits for messages.
        timing: The course of the step.
    """
    moments = [*timing.ready, timing.backward_s]
    late = 0.0
    for message, moment in zip(messages, _arrivals(messages, releases, moments), strict=True):
        needed = min(timing.needed[slot] for slot in message.slots) if awaits == "read" else 0.0
        late = max(late, moment - timing.backward_s - needed)
    return timing.compute_s + late


def step_lower_bound(timing: Timing, seconds: Sequence[float], awaits: Awaits) -> float:
    """Return the seconds of the fastest possible step, whatever the engine: no order and no overlap can beat it.

    Consider the gradients that are ready no earlier than ``a``, from the beginning of backward, and needed no later
    than ``d``, from the beginning of the next forward. They must be sent between the two. With a step time ``T`` and a
    forward time ``f``, that leaves ``T - f - a + d``. For gradients that may be divided at will, the largest of these
    bounds is the least step time. With ``backward``, all gradients are needed by ``d = 0``. With ``each``, nothing is
    sent before backward has ended.

    Args:
        timing: The course of the step.
        seconds: Time for which each slot's gradients keep the wire busy; in total, one undisturbed all-reduce of all.
        awaits: Where the engine waits for gradients.
    """
    if awaits == "each":
        return timing.compute_s + sum(seconds)
    needed = timing.needed if awaits == "read" else [0.0] * len(seconds)
    slots = list(zip(timing.ready, needed, seconds, strict=True))
    bounds = (
        timing.forward_s + a - d + sum(s for ready, need, s in slots if ready >= a and need <= d)
        for a in set(timing.ready)
        for d in set(needed)
    )
    return max(timing.compute_s, *bounds)


def _arrivals(
    messages: Sequence[SimMessage], releases: Sequence[Sequence[int]], moments: Sequence[float]
) -> list[float]:
    """Return when each message is received, in seconds from the beginning of backward."""
    released = [0.0] * len(messages)
    queues: dict[str, deque[int]] = {}
    for moment, numbers in zip(moments, releases, strict=True):
        for number in numbers:
            released[number] = moment
            queues.setdefault(messages[number].queue, deque()).append(number)
    under_way = dict.fromkeys(queues, 0)
    received, begun = [math.inf] * len(messages), [0.0] * len(messages)
    events = [(moment, _RELEASED, -1) for moment in sorted(set(released))]
    wire, processor = _Wire(), 0.0
    while events or wire.next_through < math.inf:
        if not events or wire.next_through <= events[0][0]:
            now, number = wire.end()
            link, codec, size = messages[number].link, messages[number].codec, messages[number].task.message
            here = max(now, begun[number] + link.call_s) + link.latency_s + size * codec.decode_s_per_byte
            heapq.heappush(events, (here, _RECEIVED, number))
            continue
        now, event, number = heapq.heappop(events)
        if event == _BEGUN:
            wire.begin(now, number, messages[number])
            continue
        if event == _RECEIVED:
            received[number] = now
            under_way[messages[number].queue] -= 1
        for name, queue in queues.items():
            while queue and released[queue[0]] <= now and all(received[n] <= now for n in messages[queue[0]].waits):
                message, size = messages[queue[0]], messages[queue[0]].task.message
                if under_way[name] >= message.abreast:
                    break
                number = queue.popleft()
                under_way[name] += 1
                begun[number] = max(now, processor) + size * message.codec.encode_s_per_byte
                processor = begun[number] + message.link.call_s + size * message.codec.decode_s_per_byte
                heapq.heappush(events, (begun[number], _BEGUN, number))
    return received


class _Wire:
    """A wire that all queues share evenly; the messages of a queue pass one after the other, as on a connection."""

    def __init__(self) -> None:
        self._now = 0.0
        self._served = 0.0
        """Seconds of the whole wire that a queue in use from the beginning would have had."""
        self._queues: dict[str, deque[tuple[int, float]]] = {}
        """For each queue, its messages in flight, with the seconds that each would take alone."""
        self._ends: list[tuple[float, str]] = []
        """A heap: for each queue in use, the value of ``_served`` at which its first message has passed."""

    @property
    def next_through(self) -> float:
        """Time at which the next message is through, if no other begins."""
        return self._now + (self._ends[0][0] - self._served) * len(self._ends) if self._ends else math.inf

    def begin(self, now: float, number: int, message: SimMessage) -> None:
        """Add a message behind those of its queue."""
        queue = self._queues.setdefault(message.queue, deque())
        queue.append((number, message.task.message * message.link.s_per_byte))
        if len(queue) == 1:
            self._served += (now - self._now) / max(1, len(self._ends))
            self._now = now
            heapq.heappush(self._ends, (self._served + queue[0][1], message.queue))

    def end(self) -> tuple[float, int]:
        """Remove the next message that is through; return when that is, and its number."""
        self._now = self.next_through
        self._served, name = heapq.heappop(self._ends)
        number, _ = self._queues[name].popleft()
        if self._queues[name]:
            heapq.heappush(self._ends, (self._served + self._queues[name][0][1], name))
        return self._now, number
