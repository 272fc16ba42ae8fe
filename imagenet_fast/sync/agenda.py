"""In which order, and how early, the transfers of a step begin.

A wire has no use for more than it can carry until something more urgent may turn up. So what has been produced in
backward is held back while the wire is busy anyway, and when a layer turns up that the next forward needs sooner, it
goes first. All ranks must begin their transfers in one order, so nobody decides by what he sees: after a few steps
the times are averaged and the releases of all later steps are laid down, once.

Scheduling transfers by when they are needed is from P3 (Jayarajan et al., arXiv 1905.03960) and ByteScheduler
(Peng et al., SOSP 2019); there a coordinator, or a parameter server, makes ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from imagenet_fast.sync.engine import Mark, mark, seconds_between
from imagenet_fast.sync.link import Link

_WARM_STEPS, _TIMED_STEPS = 2, 3
_SLACK = 1.3  # releases reach this much further than the next event, against a wire that idles when a step is slow


@dataclass(frozen=True)
class Task:
    """A transfer, one of the same number every step."""

    event: int
    """The first event at which it can begin."""
    message: float
    """Bytes of all-reduce that it keeps the wire busy for."""
    urgency: tuple[int, ...]
    """Lower goes first."""
    after: int | None = None
    """A task that must have begun before."""


def plan_releases(tasks: Sequence[Task], times: Sequence[float], s_per_byte: float) -> list[list[int]]:
    """Which tasks begin at which event, given the times of the events in seconds.

    At each event the most urgent tasks that can begin are released, until they keep the wire busy past the next
    event; at the last event all that is left.
    """
    held = set(range(len(tasks)))
    releases: list[list[int]] = []
    busy_until = times[0]
    for event, now in enumerate(times):
        last = event == len(times) - 1
        horizon = now if last else now + _SLACK * (times[event + 1] - now)
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


class Agenda:
    """Holds the transfers of a step until their time. Events are numbered from 0 in every step."""

    def __init__(self, events: int, device: torch.device) -> None:
        self._events = events
        self._device = device
        self._step = 0
        self._marks: list[list[Mark]] = []  # by timed step
        self._starts: list[Callable[[], None]] = []  # of this step's tasks so far
        self._begun = 0  # of them, before there is a plan
        self._tasks: list[Task] = []
        self._releases: list[list[int]] | None = None

    @property
    def learning(self) -> bool:
        """Whether :meth:`plan` is still to be called at the end of this step."""
        return self._releases is None and self._step == _WARM_STEPS + _TIMED_STEPS

    def add(self, task: Task, start: Callable[[], None]) -> int:
        """A transfer that can begin from its event on. Returns its number in this step."""
        self._starts.append(start)
        if self._releases is None:
            self._tasks.append(task)
        return len(self._starts) - 1

    def reach(self, event: int) -> None:
        """Begin what is due at this event: without a plan, all there is."""
        if self._releases is not None:
            due = self._releases[event]
        else:
            due = list(range(self._begun, len(self._starts)))
            self._begun = len(self._starts)
            if self._step >= _WARM_STEPS:
                if event == 0:
                    self._marks.append([])
                self._marks[-1].append(mark(self._device))
        for number in due:
            self._starts[number]()
        if event == self._events - 1:
            self._step += 1
            self._starts.clear()
            self._begun = 0
            if self._releases is None and not self.learning:
                self._tasks.clear()

    def plan(self, link: Link) -> None:
        """Lay down all later steps, from the times of the steps so far. Every rank must call it."""
        times = torch.tensor(
            [[seconds_between(marks[0], each) for each in marks] for marks in self._marks],
            dtype=torch.float64, device=self._device,
        ).median(0).values  # fmt: skip
        dist.all_reduce(times)
        self._releases = plan_releases(self._tasks, (times / dist.get_world_size()).tolist(), link.s_per_byte)
