"""The scheduler that runs an engine: it launches, awaits, counts and times messages, and plans their launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.cost_model import messages as cost_messages
from imagenet_fast.cost_model.collectives import piece_bytes, slot_alignment
from imagenet_fast.cost_model.layer_profile import Timing
from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.cost_model.priority_schedule import as_ready
from imagenet_fast.cost_model.step_prediction import StepModel, releases_of, thresholds, waits_for
from imagenet_fast.sync.all_reduce import all_reduce, format_of, wire_dtype, wire_for
from imagenet_fast.sync.comm_stream import CommOp, Wait, launch
from imagenet_fast.sync.engine import SyncEngine, SyncStats, refuse_state_of_another
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.kept_state import Kept, copied
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.param_slot import ParamSlot, label_of
from imagenet_fast.sync.powersgd import average_factors
from imagenet_fast.sync.quantization import BlockMap, ErrorFeedback, is_coded

_ON_ONE_NODE = 2.0**22
"""The bucket size in bytes where all ranks are on one node and have no GPUs.

Measuring would gain little there. Also, a backend's rounding depends on how messages are cut, so measured sizes would
let two identical runs end with different bits.
"""


BucketChunk = cost_messages.BucketChunk[ParamSlot]
"""One message: a piece of a bucket, or one half of that piece's all-reduce."""


@dataclass(frozen=True)
class _Plan:
    """What is sent in every step, and when."""

    messages: Sequence[BucketChunk]
    ops: Sequence[Sequence[CommOp]]
    """The ops of each message."""
    labels: Sequence[str]
    """The names of each message's layers."""
    of_slot: Mapping[ParamSlot, Sequence[int]]
    """The numbers of the messages that carry a slot's gradient."""
    releases: Sequence[Sequence[int]]
    """The numbers of those launched at each event: every push, then the end of backward."""
    waits: Sequence[Sequence[int]]
    """The numbers of those that must be received before a message is launched."""


class Scheduler(SyncEngine):
    """The engine implementation that sends the gradients of a pool as a ``Declaration`` declares.

    Messages are built once, so a step only launches them. An engine that learns begins with default bucket sizes. It
    plans once the first steps have been timed, and measures the network for it.
    """

    def __init__(
        self, engine: Declaration, buffer: GradientBuffer, network: NetworkProbe | None = None,
        timing: Timing | None = None,
    ) -> None:  # fmt: skip
        """Build the messages of ``engine`` for ``buffer``.

        Args:
            engine: The declaration.
            buffer: The buffer whose gradients are sent.
            network: Measurements to share; None: measure the network when a plan needs it.
            timing: A known step timing, with which to plan at once; None: time the first steps where a plan is needed.
        """
        self.defers = engine.awaits == "read"
        self._step = 0
        self._kept: Kept = {}  # PowerSGD's, or quantisation errors until an ErrorFeedback holds them
        self._buffer, self._device = buffer, buffer.values.device
        if engine.bucket_bytes is None and buffer.topology.device.type == "cpu" and len(buffer.topology.nodes) == 1:
            engine = replace(engine, bucket_bytes=_ON_ONE_NODE)
        self._declared = engine
        self._topology = buffer.topology
        self.is_local = self._topology.size == 1 and not engine.powersgd_rank and not self.defers
        self._wire = wire_for(buffer.values.dtype, wire_dtype(engine.wire), self._topology)
        self._leaves = is_coded(self._wire) or engine.powersgd_rank > 0
        self._network, self._timing = network or NetworkProbe(self._topology, self._wire), timing
        self._residual: ErrorFeedback | None = None
        buffer.align_slots(slot_alignment(self._topology.layout, format_of(self._wire)))
        self._ready: list[torch.cuda.Event] = []  # by event of the plan: recorded by graphs, for messages beside them
        self._arrived: dict[int, torch.cuda.Event] = {}  # by number of a message: awaited by graphs
        self._timetable: LayerTimer | None = None
        self._in_flight: dict[int, Sequence[Wait]] = {}  # by number of the message: what waits for it, if it has ops
        self._stats = SyncStats.of_step(self._device, self._step, self.defers)
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Rebuild all messages, and plan them or begin to time steps. Nothing may be in flight."""
        if self._timetable is not None:
            self._timetable.close()
            self._timetable = None
        plain = self._step < self._declared.plain_steps
        self._engine = replace(self._declared, powersgd_rank=0) if plain else self._declared
        if self._residual is not None:
            self._kept, self._residual = self._residual.by_name(), None
        self._plan = _Plan((), (), (), {}, (), ())  # lets go of buffers before others are made
        self._ready, self._arrived = [], {}
        self._plan = self._planned()
        self._timetable = self._time_steps()

    def gradient_ready(self, slot: ParamSlot) -> None:
        """Launch the messages that are due once the gradient of ``slot`` is final."""
        if self._timetable is not None:
            self._timetable.gradient_ready()
        self._release(slot.index)

    def finish(self) -> SyncStats:
        """Launch the remaining messages, wait for those that are not deferred, and plan once steps have been timed.

        While steps are timed nothing is deferred.
        """
        if self._timetable is not None:
            self._timetable.finish()
        self._release(len(self._buffer.slots))
        # A forward that is being timed must not wait.
        if self._engine.awaits != "read" or self._timetable is not None:
            self._await(list(self._in_flight))
        if self._timetable is not None and self._timetable.complete:
            self._adopt(self._timetable.timing())
        if not self.captures:
            self._step += 1
            if self._step == self._declared.plain_steps:
                self._await(list(self._in_flight))
                self.rebuild_buckets()
        stats, self._stats = self._stats, SyncStats.of_step(self._device, self._step, self.defers)
        return stats

    def wait(self, slot: ParamSlot) -> None:
        """Wait for the messages that carry the gradient of ``slot``."""
        self._await(self._plan.of_slot[slot])

    def has_arrived(self, slot: ParamSlot) -> bool:
        """Return whether all messages of ``slot`` have been waited for, or were sent to no one, as on one rank."""
        return not any(map(self._in_flight.get, self._plan.of_slot[slot]))

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, quantisation errors and PowerSGD's memory; empty if there is none of these.

        Measurements are the same on every rank; errors and memory differ.
        """
        self._await(list(self._in_flight))
        learnt = None
        if self._timing is not None:
            learnt = {
                "timing": asdict(self._timing), "network": self._network.state_dict(), "ranks": self._topology.size
            }  # fmt: skip
        if not self._leaves and learnt is None and not self._kept:  # one rank keeps what several have left
            return {}
        kept = copied(self._kept, self._device) if self._residual is None else self._residual.by_name()
        return {"step": self._step, "kept": kept, "learnt": learnt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``. Do nothing if it is empty.

        Raises:
            ValueError: The state is another engine's.
        """
        if not state:
            return
        refuse_state_of_another(self, state, {"step", "kept", "learnt"})
        self._step, self._kept = state["step"], copied(state["kept"], self._device)
        self._residual = None
        if (learnt := state["learnt"]) and learnt["ranks"] == self._topology.size:
            self._timing = Timing(**learnt["timing"])
            self._network.load_state_dict(learnt["network"])
        self.rebuild_buckets()

    @property
    def is_steady(self) -> bool:
        """True once nothing is measured or planned any more; if it defers, while all messages are in flight."""
        final = self._timetable is None and not self._declared.powersgd_rank
        return final and (not self.defers or len(self._in_flight) == len(self._plan.messages))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Have the messages of the block's step captured; if it defers, only when they are ready, and the waits."""
        if self.defers and not self._ready:
            self._ready = [torch.cuda.Event(external=True) for _ in self._plan.releases]
            self._arrived = {n: torch.cuda.Event(external=True) for n, ops in enumerate(self._plan.ops) if ops}
        before, self.captures = dict(self._in_flight), True
        for number, event in self._arrived.items():
            if number in before:
                self._plan.ops[number][-1].stream.record(event)
                self._in_flight[number] = (event.wait,)
        try:
            yield
        except BaseException:
            self._in_flight, self._stats = before, SyncStats.of_step(self._device, self._step, self.defers)
            raise
        finally:
            self.captures = False

    def replayed(self) -> None:
        """Count a step, and launch the messages that its graph has made ready."""
        self._step += 1
        if self.defers:
            # The graph has waited for those of the step before, which are counted with it.
            self._in_flight, self._stats = {}, SyncStats.of_step(self._device, self._step, self.defers)
            for event, ready in enumerate(self._ready):
                self._launch(self._plan.releases[event], [ready.wait])

    def residuals(self) -> list[Tensor]:
        """Return what quantisation has left."""
        return [] if self._residual is None else self._residual.rows

    def close(self) -> None:
        """Wait for all messages, and remove the hooks of a timer."""
        self._await(list(self._in_flight))
        if self._timetable is not None:
            self._timetable.close()

    def _time_steps(self) -> LayerTimer | None:
        """Begin to time steps, if a plan needs it."""
        unknown = self._timing is None and self._engine.learns and self._buffer.model is not None
        return self._buffer.layer_timer() if unknown else None

    def _adopt(self, timing: Timing) -> None:
        """Plan by what was timed."""
        self._timing = timing
        self.rebuild_buckets()

    def _planned(self) -> _Plan:
        """Build the messages of all later steps.

        Until steps have been timed, messages are launched as soon as they are ready. Buckets have the smallest size to
        choose from; on a GPU a piece's, since launches delay the backward that is timed.
        """
        engine, buffer, timing, layout = self._engine, self._buffer, self._timing, self._topology.layout
        model, fuse = step_model(engine, buffer, self._network), engine.bucket_bytes
        if fuse is None:
            first = piece_bytes(layout) if layout.on_gpu else thresholds(engine, layout)[0]
            fuse = first if timing is None else model.best(timing)[0]
        messages = model.messages(fuse)
        if timing is None:
            releases = as_ready([message.task for message in messages], len(buffer.slots) + 1)
        else:
            releases = releases_of(engine, messages, timing, self._network)
        of_slot: dict[ParamSlot, list[int]] = {slot: [] for slot in buffer.slots}
        for number, message in enumerate(messages):
            for slot in message.bucket:
                of_slot[slot].append(number)
        ops, labels = self._ops(messages), [label_of(message.bucket) for message in messages]
        return _Plan(messages, ops, labels, of_slot, releases, waits_for(engine, messages, releases))

    def _ops(self, messages: Sequence[BucketChunk]) -> list[Sequence[CommOp]]:
        """Build the ops of all messages, and take over what quantisation has left."""
        buffer, residual = self._buffer, None
        if is_coded(self._wire):
            residual = ErrorFeedback(buffer.slots, buffer.values.device, self._kept)
        ops: list[Sequence[CommOp]] = []
        rest: Sequence[CommOp] = ()
        for message in messages:
            if message.half == 1:
                ops.append(rest)
                continue
            now, rest = self._halves(message, None if residual is None else residual.blocks(message.part))
            ops.append(now)
        if residual is not None:
            residual.adopted()
            self._residual, self._kept = residual, {}
        return ops

    def _halves(self, message: BucketChunk, blocks: BlockMap | None) -> tuple[Sequence[CommOp], Sequence[CommOp]]:
        """Return the ops of a message's first and second half; all are in the first unless the engine has halves."""
        engine, buffer, topology = self._engine, self._buffer, self._topology

        def average(values: Tensor, lane: str) -> list[CommOp]:
            direct = engine.split_reduce_scatter and not engine.powersgd_rank
            return all_reduce(values, self._wire, message.collective, topology, engine.servers, direct, lane, blocks)

        if not engine.powersgd_rank:
            ops = average(buffer.values[message.part], message.lane)
            turn = next((n for n, op in enumerate(ops) if op.second_half and engine.split_reduce_scatter), len(ops))
        elif topology.size == 1:
            return [], []
        else:
            first, second = average_factors(
                message.bucket, buffer.values, topology, engine.powersgd_rank, self._kept, message.lane, average
            )
            ops = [*first, *second]
            turn = len(first) if engine.split_reduce_scatter else len(ops)
        return ops[:turn], ops[turn:]

    def _release(self, event: int) -> None:
        """Launch the messages of ``event``: the index of a pushed slot, or the number of slots for backward's end.

        A message queues behind those of its own lane and collective, and waits for those that the plan names. All in
        flight share the wire.
        """
        if not (numbers := self._plan.releases[event]):
            return
        self._buffer.fill()
        if self.captures and self.defers:
            self._ready[event].record()
            self._in_flight |= dict.fromkeys(numbers, (_refuse_capture,))
        else:
            self._launch(numbers)

    def _launch(self, numbers: Sequence[int], ready: Sequence[Wait] = ()) -> None:
        """Launch messages, once all of ``ready`` are done."""
        plan, in_flight = self._plan, self._in_flight
        for number in numbers:
            waits = [other for other in plan.waits[number] if other in in_flight]
            if self._engine.awaits == "each":
                self._await([other for other in waits if other != plan.messages[number].task.after])
            after = [wait for other in waits for wait in in_flight.get(other, ())]
            in_flight[number] = launch(plan.ops[number], [*ready, *after], plan.labels[number])
            if number in self._arrived:
                plan.ops[number][-1].stream.record(self._arrived[number])

    def _await(self, numbers: Sequence[int]) -> None:
        """Wait for messages, and add them to the step's statistics, unless a signal's handler does so meanwhile."""
        if due := [number for number in numbers if number in self._in_flight]:
            self._stats.wait([(self._plan.labels[number], self._in_flight.get(number, ())) for number in due])
        for number in due:  # those that are lost stay in flight
            if self._in_flight.pop(number, None) is not None:
                self._stats.count(sum(op.sent_bytes for op in self._plan.ops[number]))


def _refuse_capture() -> None:
    """Refuse to wait in a graph for a message that is launched when the graph has run."""
    raise RuntimeError("a message of the step would have to be waited for in the step itself")


def step_model(
    engine: Declaration, buffer: GradientBuffer, network: NetworkProbe, share: float = 1.0
) -> StepModel[ParamSlot]:
    """Return a model of the engine's step, which builds its messages and predicts its time.

    Args:
        engine: The engine's declaration. If it has a bucket size of its own, only that is predicted.
        buffer: The buffer whose gradients are sent.
        network: The costs of collectives and codecs, measured when they are first needed.
        share: Share of the values that the engine sends.
    """
    wire = wire_for(buffer.values.dtype, wire_dtype(engine.wire), buffer.topology)
    return StepModel(
        engine, buffer.slots, buffer.alignment, buffer.topology.layout, format_of(wire), network,
        lambda: network.codec(wire), share,
    )  # fmt: skip
