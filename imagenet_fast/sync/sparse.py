"""Coarse-grained sparse communication: each step sends only the chunks of the pool that matter most.

After GradientFlow (arXiv 1902.06855): the pool is cut into chunks of a fixed size, all ranks agree on the chunks' L1
norms, and the largest are sent. Gradients are added to the pool, so a chunk that is not sent adds up until it is. Its
weights and their momentum do not change meanwhile. A step's chunks are chosen from the norms of the step before, so
they can be sent during backward. Ranks agree on the norms during the next forward, while chunks may still be in flight.

With momentum correction (Deep Gradient Compression, Lin et al., arXiv 1712.01887), each rank's velocity, u <- mu u + g,
is added up in the pool. Where a chunk is sent, u is cleared too, unless all chunks are sent. Then the means equal, to
about the last digit, what momentum makes of mean gradients.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.cost_model.collectives import piece_bytes
from imagenet_fast.cost_model.messages import HIGH_PRIORITY
from imagenet_fast.recipe.sync_config import SparseSync
from imagenet_fast.recipe.sync_table import chosen_collective, fusion_bytes
from imagenet_fast.sync.all_reduce import all_reduce, wire_dtype, wire_for
from imagenet_fast.sync.comm_stream import CommOp, Wait, launch
from imagenet_fast.sync.engine import Elements, SyncEngine, SyncStats, refuse_state_of_another
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.kept_state import cut, lay
from imagenet_fast.sync.param_slot import USED, ParamSlot


@dataclass(frozen=True)
class _Message:
    """Chunks that are sent together."""

    begin: int
    """First element in the pool; not everything between ``begin`` and ``end`` need be a part of the message."""
    end: int
    ops: Sequence[CommOp]
    """Kept until the chunks are received: nothing else holds the memory that streams of a GPU still use."""
    label: str
    waits: Sequence[Wait]
    """The function that waits for the last op; none if there are no ops."""


class Sparse(SyncEngine):
    """An engine that sends all but ``settings.sparsity`` of the chunks.

    Chunks are fused up to a threshold of bytes on the wire. The first steps send everything. Over the next steps the
    share that is not sent grows. No chunk waits more than twice as long as it would if all took turns.
    """

    sends_part = True

    def __init__(self, settings: SparseSync, buffer: GradientBuffer, steps_per_epoch: int) -> None:
        """Take over the pool, with an empty residual.

        Args:
            settings: The recipe's settings.
            buffer: The buffer to work on. It is lengthened to a whole number of chunks, and cleared.
            steps_per_epoch: Converts the settings' epochs to steps.
        """
        self.defers = settings.defers
        self._buffer, self._topology = buffer, buffer.topology
        self._wire = wire_for(buffer.values.dtype, wire_dtype(settings.wire), self._topology)
        self._settings = settings
        self._dense_steps = round((settings.dense_epochs or 0.0) * steps_per_epoch)
        self._ramp_steps = round(settings.ramp_epochs * steps_per_epoch)
        threshold = fusion_bytes(settings.threshold_mb)
        self._threshold = piece_bytes(self._topology.layout) / 4 if threshold is None else threshold
        self._collective = chosen_collective(settings.collective)
        self._momentum = settings.velocity_momentum
        self.adds_momentum = self._momentum is not None
        self._slots: list[ParamSlot] = []
        self._velocity = buffer.values.new_zeros(0)  # laid out as the pool
        self._step = 0
        self._stats = SyncStats.of_step(buffer.values.device, 0, self.defers)
        self._agreed: Sequence[Wait] = ()  # on the scores, and so on the next step's chunks; empty where all are sent
        buffer.pad(settings.chunk)
        buffer.values.zero_()  # what another engine has sent is no residual
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Cut the pool's new layout into chunks, reset scores and ages, and move the velocity along."""
        device, topology, chunk = self._buffer.values.device, self._topology, self._settings.chunk
        self._await_choice()  # else it would choose from the new layout
        self._agreed = ()
        self._chunks = self._buffer.values.view(-1, chunk)
        count = len(self._chunks)
        if self._momentum is not None:
            before, slots = self._velocity, self._slots
            self._velocity, self._slots = torch.zeros_like(self._buffer.values), list(self._buffer.slots)
            lay(cut(slots, velocity=before), "velocity", self._slots, self._velocity)
        self._scores = torch.zeros(topology.padded(count), dtype=torch.float32, device=device)
        self._norms = self._scores[:count].clone()  # of the means of the sent chunks, in their order
        self._ages = torch.zeros(count, dtype=torch.int64, device=device)  # steps since a chunk was last sent
        self._measurement = [CommOp(topology.stream((), "packing"), self._measure)]
        self._agreement = [
            CommOp(topology.stream((), "packing"), self._put_means),
            *all_reduce(self._scores, torch.float32, None, topology),
            CommOp(topology.stream((), "landing"), self._choose),
        ]
        self._here = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")  # ids
        self._choose()
        self._sent = self._ids[:0]  # chunks in the pool that have been applied
        self._selected: list[int] = []  # ids of this step's chunks, rising
        self._next = 0  # index of the first that is not launched
        self._packed = 0  # index of the first that is not ready
        self._messages: list[_Message] = []  # in flight

    @property
    def sent(self) -> list[slice]:
        """The parts of the pool that the last step sent, in order, with neighbours merged."""
        parts: list[slice] = []
        for number in self._selected:
            begin, end = number * self._settings.chunk, (number + 1) * self._settings.chunk
            first = parts.pop().start if parts and parts[-1].stop == begin else begin
            parts.append(slice(first, end))
        return parts

    def start(self) -> None:
        """Clear the chunks that were sent, and read which chunks this step sends."""
        self._await(list(self._messages))  # those whose layers no forward has read
        self._await_choice()
        if self._arrived is not None:  # of the last step, long past: ids arrived during forward
            self._arrived.synchronize()
        self._selected = self._here[: len(self._ids)].tolist()
        self._clear(self._buffer.values, self._velocity)
        self._sent = self._ids[:0]

    def store_gradients(self, places: list[Tensor], gradients: list[Tensor]) -> None:
        """Add gradients to the residual; with momentum correction, velocities instead."""
        if self._momentum is None:
            return torch._foreach_add_(places, gradients)
        velocities = [self._velocity.as_strided(x.size(), x.stride(), x.storage_offset()) for x in places]
        torch._foreach_mul_(velocities, self._momentum)
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(places, velocities)
        for velocity in velocities:
            velocity.nan_to_num_(0.0, 0.0, 0.0)  # the pool holds what is not finite; it must not persist
        return None

    def store_unused(self, place: Tensor) -> None:
        """Add a gradient of zero. The flag has no residual; while chunks are unsent, no rank knows the others' use."""
        self.store_gradients([place], [torch.zeros_like(place)])
        place[-1] = 0.0 if len(self._selected) == len(self._chunks) else USED

    def gradient_ready(self, slot: ParamSlot) -> None:
        """Launch the chosen chunks that are complete, once they reach the threshold, but the last: see ``spoil``."""
        ready = min(bisect_right(self._selected, slot.stop // self._settings.chunk - 1), len(self._selected) - 1)
        while self._packed < ready:
            self._packed += 1
            if (self._packed - self._next) * self._settings.chunk * self._wire.itemsize >= self._threshold:
                self._launch()

    def finish(self) -> SyncStats:
        """Launch the remaining chunks, begin to agree on the next step's chunks, and return the statistics."""
        self._packed = len(self._selected)
        self._launch()
        if not self.defers:
            self._await(list(self._messages))
        self._next = self._packed = 0
        self._sent = self._ids
        self._step += 1
        if self._agreed:
            self._stats.count(sum(op.sent_bytes for op in self._agreement))
            self._agreed = ()
        if self._density(self._step) < 1:
            # Unsent chunks are measured now, sent ones once received, because the update may change them.
            landed = [wait for message in self._messages for wait in message.waits]
            self._agreed = launch(self._agreement, [*launch(self._measurement), *landed], "the chunks' norms")
        stats, self._stats = self._stats, SyncStats.of_step(self._buffer.values.device, self._step, self.defers)
        return stats

    def spoil(self) -> None:
        """Put NaN into the chunks that are not launched yet."""
        self._chunks.index_fill_(0, self._ids[self._next :], math.nan)

    def forget_nonfinite(self) -> None:
        """Set to zero what is not finite in the pool."""
        self._await_choice()  # it reads the pool
        self._buffer.values.nan_to_num_(0.0, 0.0, 0.0)

    def wait(self, slot: ParamSlot) -> None:
        """Wait for the messages that may hold a part of ``slot``."""
        self._await(self._carrying(slot))

    def has_arrived(self, slot: ParamSlot) -> bool:
        """Return whether no message in flight may hold a part of ``slot``."""
        return not self._carrying(slot)

    def sent_slices(self) -> Elements | None:
        """Return the elements of each parameter that the last step sent; None if it sent all."""
        if len(self._selected) == len(self._chunks):
            return None
        elements: Elements = {}
        starts = self._starts()
        for part in self.sent:
            for slot in self._buffer.slots[bisect_right(starts, part.start) - 1 : bisect_left(starts, part.stop)]:
                begin, end = max(part.start - slot.start, 0), min(part.stop - slot.start, slot.shape.numel())
                if begin < end:
                    elements.setdefault(slot.param, []).append(slice(begin, end))
        return elements

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank, unlike others, has not sent, and what decides when it will be sent."""
        self._await_choice()
        flat = {"residual": self._buffer.values.clone(), "velocity": self._velocity.clone()}
        self._clear(**flat)
        chunks = {"scores": self._scores.clone(), "ages": self._ages.clone(), "starts": self._starts()}
        if self._momentum is None:
            del flat["velocity"]
        return {"step": self._step, "kept": cut(self._buffer.slots, **flat), "chunks": chunks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``; scores and ages apply only if the pool's layout is the same.

        Raises:
            ValueError: The state is another engine's.
        """
        refuse_state_of_another(self, state, {"step", "kept", "chunks"})
        self.rebuild_buckets()
        self._step, slots, kept, chunks = state["step"], self._buffer.slots, state["kept"], state["chunks"]
        lay(kept, "residual", slots, self._buffer.values)
        if self._momentum is not None:
            lay(kept, "velocity", slots, self._velocity)
        same = chunks is not None and list(kept) == [slot.name for slot in slots] and chunks["starts"] == self._starts()
        if same and len(chunks["ages"]) == len(self._ages):  # else the chunks hold other values than they did
            self._scores[: len(self._chunks)] = chunks["scores"][: len(self._chunks)]
            self._ages.copy_(chunks["ages"])
        self._choose()

    def _starts(self) -> list[int]:
        return [slot.start for slot in self._buffer.slots]

    def close(self) -> None:
        """Wait for all messages."""
        self._await(list(self._messages))
        self._await_choice()

    def _await_choice(self) -> None:
        """Wait until ranks have agreed on the next step's chunks."""
        for wait in self._agreed:
            wait()

    def _clear(self, residual: Tensor, velocity: Tensor) -> None:
        """Zero what was sent in the residual and, unless all chunks were sent, in the velocity."""
        residual.view_as(self._chunks).index_fill_(0, self._sent, 0.0)
        if self._momentum is not None and len(self._sent) < len(self._chunks):
            velocity.view_as(self._chunks).index_fill_(0, self._sent, 0.0)

    def _density(self, step: int) -> float:
        """Return the share of the chunks that is sent in a step."""
        ramped = min(1.0, (step - self._dense_steps + 1) / (self._ramp_steps + 1))
        return 1.0 if step < self._dense_steps else 1 - self._settings.sparsity * ramped

    def _launch(self) -> None:
        """Send the chunks that are ready; copy them together unless they are contiguous."""
        self._buffer.fill()
        ids, count = self._ids[self._next : self._packed], self._packed - self._next
        first, last = self._selected[self._next], self._selected[self._packed - 1]
        norms = self._norms[self._next : self._packed] if self._density(self._step + 1) < 1 else None
        topology, chunk = self._topology, self._settings.chunk
        lane = HIGH_PRIORITY if self.defers and self._packed == len(self._selected) else ""
        apart = last - first + 1 != count or count * chunk % topology.size != 0
        values = (
            self._buffer.values.new_zeros(topology.padded(count * chunk)) if apart else self._chunks[first : last + 1]
        )
        rows = values.view(-1)[: count * chunk].view(count, chunk)

        def pack() -> None:
            torch.index_select(self._chunks, 0, ids, out=rows)

        def land() -> None:
            if apart:
                self._chunks.index_copy_(0, ids, rows)
            if norms is not None:
                norms.copy_(_norms(rows))

        ops = all_reduce(values.view(-1), self._wire, self._collective, topology, lane=lane)
        if apart:
            ops.insert(0, CommOp(topology.stream((), lane + "packing"), pack))
        if apart or norms is not None:
            ops.append(CommOp(topology.stream((), lane + "landing"), land))
        begin, end, label = first * chunk, (last + 1) * chunk, f"{count} chunks"
        self._messages.append(_Message(begin, end, ops, label, launch(ops, label=label)))
        self._next = self._packed

    def _carrying(self, slot: ParamSlot) -> list[_Message]:
        """Return the messages in flight that may hold a part of ``slot``."""
        return [m for m in self._messages if m.begin < slot.stop and slot.start < m.end]

    def _await(self, messages: Sequence[_Message]) -> None:
        """Wait for messages, and count them."""
        self._stats.wait([(message.label, message.waits) for message in messages])
        for message in messages:
            with suppress(ValueError):  # a signal's handler has waited for it
                self._messages.remove(message)
                self._stats.count(sum(op.sent_bytes for op in message.ops))

    def _measure(self) -> None:
        """Compute the L1 norm of every chunk as it is on this rank."""
        self._scores[: len(self._chunks)] = _norms(self._chunks)

    def _put_means(self) -> None:
        """Replace the scores of sent chunks by the norms of their means; all others are a step older."""
        self._scores[self._ids] = self._norms[: len(self._ids)]
        self._ages += 1
        self._ages[self._ids] = 0  # all, in a step before the first choice: those need no ages

    def _choose(self) -> None:
        """Choose the chunks of the next step, the same on every rank, as they agree on the scores.

        Overdue chunks go first, those that have waited longest before the others. With a mere bonus for age, some
        chunks would starve because of their place.
        """
        chunks = len(self._chunks)
        count = math.ceil(self._density(self._step) * chunks)
        urgency = torch.where(self._ages >= 2 * math.ceil(chunks / count), self._ages, 0)
        by_score = torch.sort(self._scores[:chunks], descending=True, stable=True).indices
        by_urgency = by_score[torch.sort(urgency[by_score], descending=True, stable=True).indices]
        self._ids = by_urgency[:count].sort().values
        self._here[:count].copy_(self._ids, non_blocking=True)
        self._arrived = torch.cuda.current_stream().record_event() if self._ids.is_cuda else None


def _norms(chunks: Tensor) -> Tensor:
    """Return the L1 norm of each chunk, in fp32 or better."""
    norms: Tensor = torch.linalg.vector_norm(chunks, 1, dim=1, dtype=torch.promote_types(chunks.dtype, torch.float32))
    return norms
