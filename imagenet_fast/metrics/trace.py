"""A timeline of steps for Perfetto (ui.perfetto.dev): computation, transfers and waits, by layer."""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp, seconds_between
from imagenet_fast.sync.comm_stream import Transfer
from imagenet_fast.sync.engine import SyncStats

TRACKS = ("compute", "wait", "wire")
TRACED = range(10, 15)
"""Steps of a run that are traced, counted from 0; engines need those before for their plans."""


class Trace:
    """A recorder of some steps: their computation, transfers and waits."""

    def __init__(self, model: nn.Module, device: torch.device, path: Path, steps: range = TRACED) -> None:
        """Prepare to trace some steps, by default after engines have made their plans.

        Args:
            model: The model, with a synchroniser attached.
            device: The device that computes.
            path: The file to write.
            steps: The steps, counted from 0, of which step 0 cannot be one.
        """
        self._model, self._device, self._path, self._steps = model, device, path, steps
        self._ended = 0
        self._spans: list[tuple[str, str, Timestamp, Timestamp, dict[str, int]]] = []  # track, name, begin, end, bytes
        self._entered: dict[str, Timestamp] = {}
        self._hooks: list[Any] = []
        Transfer.record = []

    def end_step(self, stats: SyncStats) -> None:
        """Count a step. Call it after every step, once its gradients are synchronised."""
        if self._ended in self._steps:
            now = record_timestamp(self._device)
            self._spans.append(("mark", "step ends", now, now, {}))
            if stats.exposed is None:  # as of DDP: then the wait is the time since the last gradient was ready
                self._spans.append(("wait", "wait inside backward", self._done, now, {}))
            else:
                waits = stats.exposed.blocks
                self._spans += [("wait", f"wait for {label}", begin, end, {}) for label, begin, end in waits]
        self._ended += 1
        if self._ended == self._steps.start:
            self._begin()
        elif self._ended == self._steps.stop:
            self._write()

    def _begin(self) -> None:
        self._begun = self._done = record_timestamp(self._device)  # done: the backward of the layer above
        self._hooks.append(self._model.register_forward_hook(self._turn))
        for name, module in self._model.named_modules():
            params = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if params:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
                self._hooks.append(module.register_forward_hook(partial(self._leave, name)))
                self._hooks += [p.register_post_accumulate_grad_hook(partial(self._graded, name)) for p in params]

    def _write(self) -> None:
        """Stop recording, and write Chrome's trace event format: microseconds from the first event."""
        while self._hooks:
            self._hooks.pop().remove()
        sent, Transfer.record = Transfer.record or [], None
        for one in sent:
            if one.ended is not None and seconds_between(self._begun, one.ended) > 0:
                self._spans.append(("wire", one.label, one.begun, one.ended, {"sent_bytes": one.sent_bytes}))
        timed = [
            (1e6 * seconds_between(self._begun, begin), 1e6 * seconds_between(begin, end), track, name, counts)
            for track, name, begin, end, counts in self._spans
        ]
        earliest = min(start for start, *_ in timed)  # a transfer may have begun before the trace
        events: list[dict[str, object]] = []
        lanes: list[float] = []  # by row of the wire: end of its last transfer
        for start, lasted, track, name, counts in sorted(timed, key=itemgetter(0)):
            event = {"pid": 0, "tid": 0, "name": name, "cat": track, "ts": start - earliest}
            if track == "mark":
                events.append(event | {"ph": "i", "s": "p"})
                continue
            row = TRACKS.index(track)
            if track == "wire":  # transfers overlap; each is put in the first free row
                free = next((n for n, busy in enumerate(lanes) if busy <= start), len(lanes))
                lanes[free : free + 1] = [start + lasted]
                row += free
            events.append(event | {"ph": "X", "tid": row, "dur": lasted, "args": counts})
        for row, track in enumerate([*TRACKS, *["wire"] * (len(lanes) - 1)]):
            events.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": track}})
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _enter(self, name: str, module: nn.Module, inputs: object) -> None:
        self._entered[name] = record_timestamp(self._device)

    def _leave(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self._spans.append(("compute", f"forward {name}", self._entered[name], record_timestamp(self._device), {}))

    def _turn(self, module: nn.Module, inputs: object, output: object) -> None:
        self._done = record_timestamp(self._device)
        self._spans.append(("mark", "forward ends", self._done, self._done, {}))

    def _graded(self, name: str, param: nn.Parameter) -> None:
        now = record_timestamp(self._device)
        self._spans.append(("compute", f"backward {name}", self._done, now, {}))
        self._done = now
