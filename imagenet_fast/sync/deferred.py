"""Synchronisation that overlaps backward and the next forward: a layer is waited for just before it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Transfer, together
from imagenet_fast.sync.link import Link
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.prediction import deferred_step
from imagenet_fast.sync.releases import Task, plan_releases
from imagenet_fast.sync.span import Span, label_of
from imagenet_fast.sync.timetable import Timetable, Timing


@dataclass(frozen=True)
class Stage:
    """One of the transfers that, one after another, synchronise a piece of the pool."""

    cost: float
    """Of its bytes on the wire, in units of a ring's for the whole piece."""
    start: Callable[[], Transfer]


class Deferred(SyncEngine):
    """Neighbouring spans of one ``kind`` leave together, once they come to ``fuse`` bytes on the wire.

    ``stages`` says how the values of such a run, which ends with a given span, are sent: pieces of the pool, and what
    happens to each. They leave as they become ready, until the first steps have been watched and ``measure`` has
    timed the network; from then on by a plan, the most urgently needed first.
    """

    defers = True

    def __init__(
        self,
        pool: GradientPool,
        wire: torch.dtype,
        fuse: float,
        kind: Callable[[Span], Hashable],
        stages: Callable[[Tensor, Span], Iterable[tuple[Tensor, Sequence[Stage]]]],
        measure: Callable[[], Link],
    ) -> None:
        self._pool = pool
        self._measure = measure
        self._tasks: list[Task] = []
        self._starts: list[Callable[[], Transfer]] = []  # by task
        self._carried: list[list[Span]] = []  # by task: its run
        for run in _runs(pool.spans, kind, fuse / wire.itemsize):
            closes, needed = run[-1].index, -run[-1].index  # the pool's last layers are the first of the next forward
            for piece, chain in stages(pool.buffer[run[0].start : run[-1].stop], run[-1]):
                before: int | None = None
                for number, stage in enumerate(chain):
                    message = stage.cost * piece.numel() * wire.itemsize
                    self._tasks.append(Task(closes, message, (number, needed), before))
                    self._starts.append(stage.start)
                    self._carried.append(run)
                    before = len(self._tasks) - 1
        events = len(pool.spans) + 1  # a push each, and the end of backward
        self._releases = [[n for n, task in enumerate(self._tasks) if task.event == event] for event in range(events)]
        self._numbers = {span: [n for n, run in enumerate(self._carried) if span in run] for span in pool.spans}
        self._travelling: dict[int, Transfer] = {}  # by task
        self._timetable: Timetable | None = None
        self._planned = False
        self._stats = SyncStats(Stopwatch(pool.buffer.device))

    def push(self, span: Span) -> None:
        if not self._planned:
            if self._timetable is None:
                self._timetable = Timetable(self._pool.model, self._pool.spans, self._pool.buffer.device)
            self._timetable.push()
        self._release(span.index)

    def finish(self) -> SyncStats:
        self._release(len(self._pool.spans))
        if self._timetable is not None:
            self._timetable.finish()
            if self._timetable.complete:
                together(list(self._travelling.values())).wait()  # the network is measured with nothing else on it
                self.plan(self._timetable.timing(), self._measure())
                self._timetable = None
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._pool.buffer.device))
        return stats

    def wait(self, span: Span) -> None:
        numbers = [n for n in self._numbers[span] if n in self._travelling]
        if not numbers:  # it came with another span
            return
        transfer, label = together([self._travelling.pop(n) for n in numbers]), label_of(self._carried[numbers[0]])
        assert self._stats.exposed is not None
        with self._stats.exposed(label):
            transfer.wait()
        self._stats.add(label, transfer)

    def plan(self, timing: Timing, link: Link) -> None:
        """From now on begin every transfer when it is best begun."""
        self._releases = plan_releases(self._tasks, [*timing.ready, timing.backward_s], link.s_per_byte)
        self._planned = True

    def predict(self, timing: Timing, link: Link) -> float:
        """Seconds of a step by the cost model."""
        carried = [range(run[0].index, run[-1].index + 1) for run in self._carried]
        return deferred_step(self._tasks, carried, timing, link)

    def _release(self, event: int) -> None:
        for number in self._releases[event]:
            self._travelling[number] = self._starts[number]()


def _runs(spans: Iterable[Span], kind: Callable[[Span], Hashable], fuse: float) -> list[list[Span]]:
    """Neighbours of one kind, until they come to ``fuse`` elements."""
    runs: list[list[Span]] = []
    for span in spans:
        run = runs[-1] if runs else []
        if run and kind(span) == kind(run[0]) and run[-1].stop - run[0].start < fuse:
            run.append(span)
        else:
            runs.append([span])
    return runs
