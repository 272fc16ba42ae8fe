"""Runs an engine: launches its messages, waits for them, counts and times them, and learns what it needs to plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from imagenet_fast.cost.link import Link
from imagenet_fast.cost.releases import Task, plan_releases
from imagenet_fast.cost.simulation import THRESHOLDS, deferred_step, fused_step, serial_step
from imagenet_fast.cost.timing import Timing
from imagenet_fast.recipe.engine_settings import Collective
from imagenet_fast.sync.channel import Entry
from imagenet_fast.sync.collectives import (
    Phase,
    Transfer,
    all_reduce,
    carry,
    cost_of,
    piece_bytes,
    piece_elements,
    usual_collective,
    wire_for,
)
from imagenet_fast.sync.engine import Engine, Run, Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.probing import Network
from imagenet_fast.sync.span import Span, label_of
from imagenet_fast.sync.timetable import Timetable
from imagenet_fast.sync.topology import Topology

_URGENT = "urgent "  # a lane


@dataclass(frozen=True)
class Message:
    """A piece of what travels together, or a half of its all-reduce."""

    run: Run
    """What it completes: a plan moves pieces singly, so there these are the spans that it has a part of."""
    part: slice
    """Of the pool."""
    collective: Collective
    half: int | None
    """0 or 1; None: both."""
    lane: str
    """Messages of one lane share their channels."""
    task: Task


class Scheduler(SyncEngine):
    """Carries the gradients of ``pool`` as ``engine`` declares.

    Which messages there are is settled before they travel, so a step only starts them. An engine that learns begins
    with what is usual, and plans once the first steps have been watched and the network has been measured; with
    ``timing`` it plans at once.
    """

    def __init__(
        self, engine: Engine, pool: GradientPool, network: Network | None = None, timing: Timing | None = None
    ) -> None:
        self.defers = engine.awaits == "read"
        self._engine = engine
        self._pool = pool
        self._topology = pool.topology.anew()
        self._wire = wire_for(pool.buffer.dtype, engine.wire, self._topology)
        self._network = network or Network(self._topology, self._wire)
        self._timing = timing
        self._timetable: Timetable | None = None
        self._travelling: dict[int, Transfer] = {}  # by message
        self._releases: list[list[int]] = []  # by event: a push each, and backward's end
        self._stats = SyncStats(Stopwatch(pool.buffer.device))
        self.lay_out()

    def lay_out(self) -> None:
        self._watch_no_longer()
        if self._engine.fuse is not None:
            self._arrange(self._engine.fuse)
        elif self._timing is None:
            self._arrange(_thresholds(self._engine, self._pool)[0])
        if self._timing is not None:
            self.plan(self._timing)
        elif self._engine.learns:
            self._timetable = self._pool.watch(layers=self.defers)

    def push(self, span: Span) -> None:
        if self._timetable is not None:
            self._timetable.push()
        self._release(span.index)

    def finish(self) -> SyncStats:
        if self._timetable is not None:
            self._timetable.finish()
        self._release(len(self._pool.spans))
        if self._engine.awaits != "read":
            self._await(list(self._travelling))
        if self._timetable is not None and self._timetable.complete:
            self._await(list(self._travelling))  # the network is measured with nothing else on it
            timing, self._timetable = self._timetable.timing(), None
            self.plan(timing)
        stats, self._stats = self._stats, SyncStats(Stopwatch(self._pool.buffer.device))
        return stats

    def wait(self, span: Span) -> None:
        self._await([n for n in self._numbers[span] if n in self._travelling])

    def plan(self, timing: Timing) -> None:
        """From now on fuse as is best, and begin every message when it is best begun. Nothing may be under way."""
        if self._engine.fuse is None:
            self._arrange(best_fuse(self._engine, self._pool, self._wire, timing, self._network))
        if self._engine.planned:
            tasks, times = [message.task for message in self._messages], [*timing.ready, timing.backward_s]
            self._releases = plan_releases(tasks, times, _link(self._messages, self._network).s_per_byte)

    def close(self) -> None:
        self._watch_no_longer()
        for transfer in self._travelling.values():
            transfer.wait()
        self._topology.close()

    def _watch_no_longer(self) -> None:
        if self._timetable is not None:
            self._timetable.close()
            self._timetable = None

    def _arrange(self, fuse: float) -> None:
        """Settle the messages of all later steps, which leave as soon as they are ready."""
        engine, pool = self._engine, self._pool
        self._messages = messages_of(engine, pool, self._wire, fuse, self._network)
        self._phases: list[Sequence[Phase]] = []
        self._releases = [[] for _ in range(len(pool.spans) + 1)]
        rest: Sequence[Phase] = ()
        self._numbers: dict[Span, list[int]] = {span: [] for span in pool.spans}
        for number, message in enumerate(self._messages):
            self._releases[message.task.event].append(number)
            for span in message.run:
                self._numbers[span].append(number)
            if message.half == 1:
                self._phases.append(rest)
                continue
            phases = all_reduce(
                pool.buffer[message.part], self._wire, message.collective, self._topology, engine.servers,
                engine.halves, message.lane,
            )  # fmt: skip
            turn = next((n for n, phase in enumerate(phases) if phase.gathers and engine.halves), len(phases))
            rest = phases[turn:]
            self._phases.append(phases[:turn])

    def _release(self, event: int) -> None:
        gate: Sequence[Entry] = ()
        for number in self._releases[event]:
            message = self._messages[number]
            if self._engine.awaits == "each" and message.run is not self._messages[number - 1].run:
                self._await(list(self._travelling))
            before = () if message.task.after is None else self._travelling[message.task.after].last
            transfer = self._travelling[number] = carry(self._phases[number], [*gate, *before])
            if message.lane == _URGENT and event == len(self._pool.spans):
                gate = transfer.last  # the wire is left to it, as what queues there is in its way on any channel

    def _await(self, numbers: Sequence[int]) -> None:
        """Wait for messages, and count them."""
        assert self._stats.exposed is not None
        for number in numbers:
            transfer, label = self._travelling.pop(number), label_of(self._messages[number].run)
            with self._stats.exposed(label):
                transfer.wait()
            self._stats.add(label, transfer)


def best_fuse(engine: Engine, pool: GradientPool, wire: torch.dtype, timing: Timing, network: Network) -> float:
    """The bytes on the wire from which on a run should leave, by the cost model.

    Of those within 1 % of the fastest a plan takes the smallest, since it profits from messages that it can move; else
    it is the largest, since the model leaves out what a launch costs the processor.
    """
    if engine.fuse is not None:
        return engine.fuse
    seconds = {fuse: predict(engine, pool, wire, fuse, timing, network) for fuse in _thresholds(engine, pool)}
    near = [fuse for fuse, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())]
    return min(near) if engine.planned else max(near)


def predict(
    engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, timing: Timing, network: Network,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of a step by the cost model, of an engine that sends ``share`` of the values."""
    messages = messages_of(engine, pool, wire, fuse / share, network)
    link = _link(messages, network)
    runs = [(pieces[0].task.event, share * sum(m.task.message for m in pieces)) for pieces in _by_run(messages)]
    match engine.awaits:
        case "each":
            return serial_step([size for _, size in runs], timing, link)
        case "backward":
            return fused_step(runs, timing, link)
        case "read":
            carried = [range(message.run[0].index, message.run[-1].index + 1) for message in messages]
            return deferred_step([message.task for message in messages], carried, timing, link)


def _thresholds(engine: Engine, pool: GradientPool) -> list[float]:
    """What is chosen from; a plan moves whole pieces, so nothing shorter is of use to it."""
    piece = piece_bytes(pool.topology)
    return [size for size in THRESHOLDS if size >= piece] if engine.planned else THRESHOLDS


def _link(messages: Sequence[Message], network: Network) -> Link:
    """Of the collective that carries most. A single message of it shows our own work beside the wire, which pieces
    overlap, and bytes that ``cost_of`` counts: so the wire is as fast as the faster of it and the backend's."""
    own = network.link(max(messages, key=lambda message: message.task.message).collective)
    return replace(own, s_per_byte=min(own.s_per_byte, network.link("native").s_per_byte))


def messages_of(engine: Engine, pool: GradientPool, wire: torch.dtype, fuse: float, network: Network) -> list[Message]:
    """The messages of a step, fused until ``fuse`` bytes, in the order in which their gradients are ready."""
    messages: list[Message] = []
    elements = piece_elements(wire, pool.topology)
    for run in _runs(pool.spans, engine, fuse / wire.itemsize):
        collective = _collective(engine, run, pool, wire, network)
        cost = cost_of(collective, pool.topology, engine.servers)
        for piece, start in enumerate(range(run[0].start, run[-1].stop, elements)):
            part = slice(start, min(start + elements, run[-1].stop))
            whose = [s for s in run if s.start < part.stop and part.start < s.stop] if engine.planned else run
            closes = len(pool.spans) if engine.awaits == "each" else whose[-1].index
            needed = -whose[-1].index  # the pool's last layers are the first of the next forward
            lane = _lane(engine.planned and whose[-1] is pool.spans[-1], piece, pool.topology)
            size = cost * (part.stop - part.start) * wire.itemsize
            if not engine.halves:
                messages.append(Message(whose, part, collective, None, lane, Task(closes, size, (0, needed))))
                continue
            for half in (0, 1):
                task = Task(closes, size / 2, (half, needed), len(messages) - 1 if half else None)
                messages.append(Message(whose, part, collective, half, lane, task))
    return messages


def _lane(urgent: bool, piece: int, topology: Topology) -> str:
    """What is ready last and needed first queues behind nothing. gloo carries two operations of a process group at a
    time, and both may be waiting for a rank that is behind, so pieces take two lanes in turn: 3 % of dear's step."""
    if urgent:
        return _URGENT
    return "second " if piece % 2 and topology.device.type == "cpu" else ""


def _by_run(messages: Sequence[Message]) -> Iterable[list[Message]]:
    return (list(pieces) for _, pieces in groupby(messages, key=lambda message: message.run[0]))


def _runs(spans: Iterable[Span], engine: Engine, fuse: float) -> list[Run]:
    """Neighbours of one kind, until they come to ``fuse`` elements."""
    runs: list[list[Span]] = []
    for span in spans:
        run = runs[-1] if runs else []
        enough = fuse * (engine.first if len(runs) == 1 else 1)
        if run and engine.together(span) == engine.together(run[0]) and run[-1].stop - run[0].start < enough:
            run.append(span)
        else:
            runs.append([span])
    return list(runs)


def _collective(engine: Engine, run: Run, pool: GradientPool, wire: torch.dtype, network: Network) -> Collective:
    match engine.collective:
        case None:
            usual = usual_collective(pool.buffer.dtype, wire, pool.topology)
            return "pairwise" if usual == "native" and engine.halves else usual
        case str():
            return engine.collective
        case _:
            return engine.collective(run, network)
