"""The step time of an engine, predicted from its own messages and the costs of a network. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Generic

from imagenet_fast.cost_model.collectives import RankLayout, WireFormat, operations, piece_bytes
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.messages import HIGH_PRIORITY, BucketChunk, Declaration, Links, S, divide
from imagenet_fast.cost_model.priority_schedule import as_ready, plan_release_order
from imagenet_fast.cost_model.step_simulator import NO_CODEC, THRESHOLDS, CodecCost, SimMessage, simulated_step_s


@dataclass(frozen=True)
class StepModel(Generic[S]):
    """An engine's step on a network."""

    engine: Declaration
    """The engine's declaration. If it has a bucket size of its own, only that is predicted."""
    slots: Sequence[S]
    """The slots of the gradients, in pool order."""
    alignment: int
    """Elements of which the bounds of slots are multiples."""
    layout: RankLayout
    """The ranks."""
    wire: WireFormat
    """The form in which values are sent."""
    links: Links
    """The costs of collectives."""
    codec: Callable[[], CodecCost] = lambda: NO_CODEC
    """Returns the cost of 8-bit codes."""
    share: float = 1.0
    """Share of the values that the engine sends."""

    def best(self, timing: Timing) -> tuple[float, float]:
        """Return the best bucket size in bytes on the wire, and the predicted seconds of a step with it.

        Among sizes within 1 % of the fastest, a planned engine uses the smallest, since it profits from messages that
        it can move. Other engines use the largest, since every launch has a small cost that is not in the model.
        """
        own = self.engine.bucket_bytes
        choices = thresholds(self.engine, self.layout) if own is None else [own]
        seconds = {fuse: self.step_s(fuse, timing) for fuse in choices}
        near = [fuse for fuse, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())]
        best = min(near) if self.engine.prioritized else max(near)
        return best, seconds[best]

    def step_s(self, fuse: float, timing: Timing) -> float:
        """Return the predicted seconds of a step with buckets of ``fuse`` bytes on the wire."""
        messages = self.messages(fuse)
        releases = releases_of(self.engine, messages, timing, self.links)
        simulated = [
            SimMessage(
                replace(message.task, message=self.share * message.task.message),
                range(message.bucket[0].index, message.bucket[-1].index + 1),
                self.links.link(message.collective), waits, self.codec(),
                f"{message.lane}{message.collective} {message.half}", self._abreast(message),
            )
            for message, waits in zip(messages, waits_for(self.engine, messages, releases), strict=True)
        ]  # fmt: skip
        return simulated_step_s(simulated, releases, self.engine.awaits, timing)

    def _abreast(self, message: BucketChunk[S]) -> int:
        """Return how many messages like this one can be in flight in their lane at a time.

        Each phase adds to that: a stream runs one operation at a time, gloo two per process group. A butterfly keeps
        its thread until it is done.
        """
        if message.collective == "butterfly":
            return 1
        phases = 1 if message.half is not None else operations(message.collective, self.layout, self.wire)[1]
        return phases * (1 if self.layout.on_gpu else 2)

    def messages(self, fuse: float) -> list[BucketChunk[S]]:
        """Return the messages of a step with buckets of ``fuse`` bytes on the wire."""
        return divide(self.engine, self.slots, self.alignment, self.layout, self.wire, fuse / self.share, self.links)


def releases_of(engine: Declaration, messages: list[BucketChunk[S]], timing: Timing, links: Links) -> list[list[int]]:
    """Return the numbers of the messages launched at each event: every push, then the end of backward.

    A planned engine launches them by plan, any other as soon as it can.
    """
    tasks, times = [message.task for message in messages], [*timing.ready, timing.backward_s]
    if not engine.prioritized:
        return as_ready(tasks, len(times))
    most = max(messages, key=lambda message: message.task.message).collective
    return plan_release_order(tasks, times, links.link(most).s_per_byte)


def waits_for(engine: Declaration, messages: Sequence[BucketChunk[S]], releases: list[list[int]]) -> list[list[int]]:
    """Return, by message, the numbers of those that must be received before it is launched.

    - The second half of an all-reduce waits for the first.
    - With ``each``, a bucket waits for the bucket before.
    - At the end of backward, messages wait for the last urgent one before them, which has the wire to itself: they do
      not queue behind it, as they are in other lanes.
    - With a plan, a message waits there until at most one of those before it is left of each other collective. So what
      is needed last does not share the wire with what is needed first.

    Args:
        engine: The declaration.
        messages: The messages of a step.
        releases: The numbers of those launched at each event: every push, then the end of backward.
    """
    waits: list[list[int]] = [[] if m.task.after is None else [m.task.after] for m in messages]
    if engine.awaits == "each":
        launched = [number for numbers in releases for number in numbers]
        buckets = [list(pieces) for _, pieces in groupby(launched, key=lambda number: messages[number].bucket[0])]
        for before, bucket in pairwise(buckets):
            for number in bucket:
                waits[number] += before
    urgent: list[int] = []
    by_collective: dict[str, list[int]] = {}
    for number in releases[-1]:
        collective = messages[number].collective
        if messages[number].lane == HIGH_PRIORITY:
            urgent = [number]
        else:
            waits[number] += urgent
        if engine.prioritized:
            others = [before for name, before in by_collective.items() if name != collective]
            waits[number] += [last_but_one for before in others for last_but_one in before[-2:-1]]
            by_collective.setdefault(collective, []).append(number)
    return waits


def thresholds(engine: Declaration, layout: RankLayout) -> list[float]:
    """Return the bucket sizes to choose from, in bytes on the wire.

    A plan moves whole pieces, so smaller sizes are of no use to it.
    """
    piece = piece_bytes(layout)
    return [size for size in THRESHOLDS if size >= piece] if engine.prioritized else THRESHOLDS
