"""In which order, and how early, the transfers of a step begin.

A wire has no use for more than it can carry until something more urgent may turn up. So what has been produced in
backward is held back while the wire is busy anyway, and when a layer turns up that the next forward needs sooner, it
goes first. All ranks must begin their transfers in one order, so nobody decides by what he sees: after a few steps
the times are averaged and the releases of all later steps are laid down, once.

Scheduling transfers by when they are needed is from P3 (Jayarajan et al., arXiv 1905.03960) and ByteScheduler
(Peng et al., SOSP 2019); there a coordinator, or a parameter server, makes ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SLACK = 1.3  # releases reach this much further than the next event, against a wire that idles when a step is slow


@dataclass(frozen=True)
class Task:
    """A transfer, one of the same number every step."""

    event: int
    """The first event at which it can begin."""
    message: float
    """Bytes of an all-reduce that would keep the wire busy as long."""
    urgency: tuple[int, ...]
    """Lower goes first."""
    after: int | None = None
    """A task that must have begun before."""


def plan_release_order(tasks: Sequence[Task], times: Sequence[float], s_per_byte: float) -> list[list[int]]:
    """Which tasks begin at which event, given the times of the events in seconds.

    At each event the most urgent tasks that can begin are released, until they keep the wire busy past the next
    event, but not past the last, which is when what is needed first can leave; then all that is left is released.
    """
    held = set(range(len(tasks)))
    releases: list[list[int]] = []
    busy_until = times[0]
    for event, now in enumerate(times):
        last = event == len(times) - 1
        horizon = now if last else min(now + _SLACK * (times[event + 1] - now), times[-1])
        busy_until = max(busy_until, now)
        released: list[int] = []
        while last or busy_until < horizon:
            ready = [t for t in held if tasks[t].event <= event and tasks[t].after not in held]
            if not ready:
                break
            chosen = min(ready, key=lambda t: (tasks[t].urgency, t))
            held.remove(chosen)
            released.append(chosen)
            busy_until += tasks[chosen].message * s_per_byte
        releases.append(released)
    assert not held, "a task that can never begin"
    return releases


def as_ready(tasks: Sequence[Task], events: int) -> list[list[int]]:
    """The releases where every task begins at its first event."""
    releases: list[list[int]] = [[] for _ in range(events)]
    for number, task in enumerate(tasks):
        releases[task.event].append(number)
    return releases
