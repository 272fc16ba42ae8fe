"""A timeline of steps for Perfetto (ui.perfetto.dev): computation, transfers and waits, by layer."""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from torch import nn

from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp, seconds_between
from imagenet_fast.sync.comm_stream import CommStats
from imagenet_fast.sync.engine import SyncStats

TRACKS = ("compute", "wait", "wire")


class Trace:
    """A recorder of the computation, transfers and waits of ``model``, from when it is created."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Start recording. A synchroniser must be attached to ``model`` already."""
        self._device = device
        self._begun = record_timestamp(device)
        self._events: list[tuple[str, str, Timestamp, Timestamp, dict[str, int]]] = []
        self._sent: list[tuple[str, CommStats]] = []
        self._marks: list[tuple[str, Timestamp]] = []
        self._entered: dict[str, Timestamp] = {}
        self._last = self._begun  # end of the backward of the layer above
        self._hooks = [model.register_forward_hook(self._turn)]
        for name, module in model.named_modules():
            params = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if params:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
                self._hooks.append(module.register_forward_hook(partial(self._leave, name)))
                self._hooks += [p.register_post_accumulate_grad_hook(partial(self._graded, name)) for p in params]

    def add_step(self, stats: SyncStats) -> None:
        """Record the waits and transfers of a step whose backward has just ended.

        Where the engine cannot measure its wait, as DDP, the wait is the time since the last gradient was ready.
        """
        now = record_timestamp(self._device)
        self._marks.append(("step ends", now))
        if stats.exposed is None:
            self._events.append(("wait", "wait inside backward", self._last, now, {}))
        else:
            self._events += [
                ("wait", f"wait for {label}", begin, end, {}) for label, begin, end in stats.exposed.blocks
            ]
        self._sent += [(label, phase) for label, phases in stats.transfers for phase in phases]

    def write(self, path: Path) -> None:
        """Stop recording, and write Chrome's trace event format, which Perfetto reads.

        Times are in microseconds from the first event. Instant events mark where forwards and steps end.
        """
        for hook in self._hooks:
            hook.remove()
        for label, part in self._sent:
            counts = {"sent_bytes": part.sent_bytes, "received_bytes": part.received_bytes}
            if part.begun is not None and part.ended is not None and any(counts.values()):  # else it was local
                self._events.append(("wire", label, part.begun, part.ended, counts))
        timed = [
            (1e6 * seconds_between(self._begun, begin), 1e6 * seconds_between(begin, end), track, name, counts)
            for track, name, begin, end, counts in self._events
        ]
        earliest = min((start for start, *_ in timed), default=0.0)  # a transfer may have begun before the trace
        events: list[dict[str, object]] = []
        lanes: list[float] = []  # by row of the wire: end of its last transfer
        for start, lasted, track, name, counts in sorted(timed, key=itemgetter(0)):
            row = TRACKS.index(track)
            if track == "wire":  # transfers overlap; each is put in the first free row
                free = next((n for n, busy in enumerate(lanes) if busy <= start), len(lanes))
                lanes[free : free + 1] = [start + lasted]
                row += free
            events.append(
                {"ph": "X", "pid": 0, "tid": row, "name": name, "cat": track, "ts": start - earliest, "dur": lasted}
                | {"args": counts}
            )
        for name, moment in self._marks:
            at = 1e6 * seconds_between(self._begun, moment) - earliest
            events.append({"ph": "i", "s": "p", "pid": 0, "tid": 0, "name": name, "cat": "mark", "ts": at})
        for row, track in enumerate([*TRACKS, *["wire"] * (len(lanes) - 1)]):
            events.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": track}})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _enter(self, name: str, module: nn.Module, inputs: object) -> None:
        self._entered[name] = record_timestamp(self._device)

    def _leave(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self._events.append(("compute", f"forward {name}", self._entered[name], record_timestamp(self._device), {}))

    def _turn(self, module: nn.Module, inputs: object, output: object) -> None:
        self._last = record_timestamp(self._device)
        self._marks.append(("forward ends", self._last))

    def _graded(self, name: str, param: nn.Parameter) -> None:
        now = record_timestamp(self._device)
        self._events.append(("compute", f"backward {name}", self._last, now, {}))
        self._last = now


class TracedSteps:
    """A trace of ``count`` steps of ``model`` after the ``first`` ones, written to the file ``path``.

    By default it begins when engines have made their plans.
    """

    def __init__(self, model: nn.Module, device: torch.device, path: Path, first: int = 10, count: int = 5) -> None:
        """Prepare to trace ``model``, which has a synchroniser attached, on the ``device`` that computes."""
        self._begin = partial(Trace, model, device)
        self._path = path
        self._first = first
        self._last = first + count
        self._ended = 0
        self._trace: Trace | None = None

    def end_step(self, stats: SyncStats) -> None:
        """Count a step. Call it after every step, once its gradients are synchronised."""
        self._ended += 1
        if self._trace is not None:
            self._trace.add_step(stats)
        if self._ended == self._first:
            self._trace = self._begin()
        elif self._trace is not None and self._ended == self._last:
            self._trace.write(self._path)
            self._trace = None
