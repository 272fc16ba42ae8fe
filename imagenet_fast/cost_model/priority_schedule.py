"""The order of a step's transfers, and how early each is launched.

There is no gain in giving the wire more than it can carry until something more urgent may be ready. So gradients that
are ready during backward are held back while the wire is busy anyway. When a layer that the next forward needs sooner
is ready, it goes first. All ranks must launch their transfers in one order, so no rank decides by its own timing. After
a few steps the times are averaged, and the releases of all later steps are fixed once.

Scheduling transfers by when they are needed is from P3 (Jayarajan et al., arXiv 1905.03960) and ByteScheduler (Peng et
al., SOSP 2019). There a coordinator, or a parameter server, makes the ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SLACK = 1.3  # fill the wire this many times as far as the next event, so that it is not idle in a slow step


@dataclass(frozen=True)
class Task:
    """A transfer, with the same number in every step."""

    event: int
    """The first event at which it can be launched."""
    message: float
    """Bytes of an all-reduce that keeps the wire busy as long."""
    urgency: tuple[int, ...]
    """Its priority; lower goes first."""
    after: int | None = None
    """The task that must be launched before this one, if any."""


def plan_release_order(tasks: Sequence[Task], times: Sequence[float], s_per_byte: float) -> list[list[int]]:
    """Return the numbers of the tasks to launch at each event.

    At each event the most urgent tasks that can begin are released, until they keep the wire busy past the next event.
    They are not to keep it busy past the last event, at which what is needed first can be sent. At the last event all
    remaining tasks are released.

    Args:
        tasks: The transfers of a step.
        times: Times of the events in seconds.
        s_per_byte: Seconds on the wire per byte of a task.
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
    """Return the releases in which every task is launched at its first event."""
    releases: list[list[int]] = [[] for _ in range(events)]
    for number, task in enumerate(tasks):
        releases[task.event].append(number)
    return releases
