"""A communication stream: one process group whose operations run in one order, on a thread or on a CUDA stream.

A message is a list of ``CommOp``, run one after another, each on its own stream.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp
from imagenet_fast.distributed.groups import end_group, leave_at_exit, new_group
from imagenet_fast.distributed.watchdog import PeerLost

_Collective = Callable[..., Work | None]
# Renamed in torch 2.13.
all_gather_single: _Collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: _Collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Wait = Callable[[], None]
"""Waits for an op that has been launched. On a GPU the current stream waits, not the host."""

open_streams: WeakSet[CommStream] = WeakSet()
"""Streams with threads of gloo."""


@dataclass(eq=False)
class CommOp:
    """A part of a message: local work, then at most one operation over a stream."""

    stream: CommStream
    start: Callable[[], Work | None]
    """Does the local work and starts the operation. Returns what to wait for, or None if there is nothing."""
    second_half: bool = False
    """True if the op belongs to the second half, which distributes finished means and may be delayed."""
    sent_bytes: int = 0
    """Bytes that this rank sends, each time alike; known once the op has run."""


@dataclass
class Transfer:
    """An operation of a message, as a timeline shows it."""

    label: str
    begun: Timestamp
    ended: Timestamp | None = None
    """None while it is under way."""
    sent_bytes: int = 0

    record: ClassVar[list[Transfer] | None] = None
    """The operations of the timeline that is being made. None if there is none: timing them costs the host time."""

    @classmethod
    def begin(cls, label: str, device: torch.device) -> Transfer | None:
        """Note an operation that begins now, if a timeline is made."""
        if (record := cls.record) is None:
            return None
        record.append(begun := cls(label, record_timestamp(device)))
        return begun

    def end(self, device: torch.device, sent_bytes: int) -> None:
        """Note that it ends now."""
        self.sent_bytes, self.ended = sent_bytes, record_timestamp(device)


def launch(ops: Sequence[CommOp], after: Sequence[Wait] = (), label: str = "") -> tuple[Wait, ...]:
    """Launch the ops of a message, one after another, the first once all of ``after`` are done.

    Args:
        ops: The ops.
        after: What to wait for before.
        label: The message's name in a timeline.

    Returns:
        The function that waits for the last op, after which the values are the same on every rank; none without ops.
    """
    last: Sequence[Wait] = ()
    for op in ops:
        last = [op.stream.submit(op, last or after, label)]
    return tuple(last)


class OpSequence:
    """Ops being built; local work is done by the op that follows it, on that op's thread or stream."""

    def __init__(self) -> None:
        """Create an empty list of ops."""
        self.ops: list[CommOp] = []
        self._before: list[Callable[[], object]] = []

    def add_local(self, act: Callable[[], object]) -> None:
        """Add local work."""
        self._before.append(act)

    def add_collective(self, stream: CommStream, act: Callable[[], Work | None], second_half: bool = False) -> None:
        """Add an op over ``stream`` that does the local work added before, then ``act``."""
        before, self._before = self._before, []

        def start() -> Work | None:
            for work in before:
                work()
            return act()

        self.ops.append(CommOp(stream, start, second_half))

    def close(self, stream: CommStream) -> None:
        """Add the remaining local work, if any, as a last op over ``stream``, which has no ranks."""
        if self._before:
            self.add_collective(stream, lambda: None, second_half=True)


class CommStream:
    """A queue of ops over some ranks, which run in the order in which they are submitted.

    Every rank must submit its ops in the same order.

    On a CPU a thread of the CommStream issues the ops. It waits until an op's predecessors are done, does its local
    work and starts its collective. It does not wait for that collective, so that the wire is busy while the next op is
    prepared. On a GPU nothing blocks: the caller queues everything on a CUDA stream of the CommStream.

    The operations (``all_to_all`` and so on) may be called by ops only. They return the work to wait for, and count
    bytes. The bytes are computed, since backends do not report them.
    """

    def __init__(self, device: torch.device, ranks: tuple[int, ...] = (), max_ctas: int | None = None) -> None:
        """Create a CommStream. Every rank must create those it shares with other ranks in the same order.

        Args:
            device: The device of the tensors to send.
            ranks: The ranks to communicate with, this process among them; empty for local work only.
            max_ctas: Thread blocks that NCCL may use for an operation; None: NCCL decides.
        """
        self.ranks = ranks
        self.size = max(1, len(ranks))
        self.place = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        """The index of this rank in ``ranks``."""
        self._device = device
        self._group = new_group(device, ranks, True, max_ctas) if len(ranks) > 1 else None
        if device.type == "cpu" and self._group is not None:
            leave_at_exit()
            open_streams.add(self)
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        threads = (torch.get_num_threads(),)  # else products there would use all cores, and be rounded differently
        self._thread = ThreadPoolExecutor(1, f"comm stream {id(self):x}", torch.set_num_threads, threads)
        self._sent = 0  # bytes of the op that runs

    def submit(self, op: CommOp, after: Sequence[Wait] = (), label: str = "") -> Wait:
        """Submit an op. It begins once all of ``after`` are done and all submitted before have begun.

        Args:
            op: The op.
            after: What to wait for before.
            label: The name in a timeline.
        """
        if self._stream is None:
            begun = self._thread.submit(self._begin, op, after, label)

            def wait() -> None:
                if (work := begun.result()) is not None:
                    work.wait()

            return wait
        if not after:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._begin(op, after, label)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def _begin(self, op: CommOp, after: Sequence[Wait], label: str) -> Work | None:
        """Begin an op, and on a GPU have the stream wait for it."""
        for wait in after:
            wait()
        transfer = None if self._group is None else Transfer.begin(label, self._device)
        self._sent = 0
        work = op.start()
        op.sent_bytes = self._sent
        if self._stream is not None and work is not None:
            work.wait()
            work = None
        if transfer is not None and work is not None:
            work.get_future().then(lambda _: transfer.end(self._device, op.sent_bytes))
        elif transfer is not None:
            transfer.end(self._device, op.sent_bytes)
        return work

    def record(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Record ``event``, or a new one, after all that was entered so far, and return it.

        On a CPU, where works hold what they use, return None.
        """
        return None if self._stream is None else self._stream.record_event(event)

    def all_to_all(
        self, arrived: Tensor, values: Tensor, arriving: Sequence[int] = (), leaving: Sequence[int] = ()
    ) -> Work | None:
        """Send part r of ``values`` to rank r, and receive the parts of all ranks into ``arrived``.

        Args:
            arrived: The tensor to receive into.
            values: The tensor to send.
            arriving: The elements received from each rank; empty for equal parts.
            leaving: The elements sent to each rank; empty for equal parts.
        """
        kept = leaving[self.place] if leaving else values.numel() // self.size
        self._sent += values.element_size() * (values.numel() - kept)
        return dist.all_to_all_single(
            arrived, values, list(arriving) or None, list(leaving) or None, group=self._group, async_op=True
        )

    def all_gather(self, values: Tensor, direct: bool = False) -> Work | None:
        """Send this rank's part of ``values`` to all ranks, and receive theirs, in place.

        Args:
            values: A tensor of one equal part for each rank.
            direct: On a CPU, send this rank's part to all others in one step. Else gloo forwards parts from neighbour
                to neighbour in P-1 steps for P ranks. It costs a copy, and keeps a wire busier that has nothing else
                to carry.
        """
        own = values.view(self.size, -1)[self.place]
        if direct and self._device.type == "cpu":
            return self.all_to_all(values, own.repeat(self.size))
        self._count(self.size - 1, values)
        return all_gather_single(values, own, self._group, async_op=True)

    def reduce_scatter(self, values: Tensor) -> Work | None:
        """Average this rank's part of ``values`` over the ranks, in place. The backend adds in the tensor's dtype."""
        self._count(self.size - 1, values)
        own = values.view(self.size, -1)[self.place]
        return _reduce_scatter(own, values, dist.ReduceOp.AVG, self._group, async_op=True)

    def all_reduce(self, values: Tensor, mean: bool = False) -> Work | None:
        """Sum ``values`` over the ranks, in place. The backend adds in the tensor's dtype.

        Args:
            values: The tensor to sum.
            mean: Average instead, which only NCCL can.
        """
        self._count(2 * (self.size - 1), values)
        operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return dist.all_reduce(values, operation, self._group, async_op=True)

    def exchange(self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive point-to-point messages, and wait for all of them.

        Args:
            leaving: The tensors to send, each with the index of its destination in ``ranks``.
            arriving: The tensors to receive into, each with the index of its source in ``ranks``.

        Raises:
            PeerLost: A message could not be sent or received.
        """
        operations = [dist.P2POp(dist.irecv, t, group=self._group, group_peer=peer) for peer, t in arriving]
        operations += [dist.P2POp(dist.isend, t, group=self._group, group_peer=peer) for peer, t in leaving]
        self._sent += sum(t.nbytes for _, t in leaving)
        for number, work in enumerate(dist.batch_isend_irecv(operations)):
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(operations[min(number, len(operations) - 1)].peer, error) from error

    def close(self) -> None:
        """End the thread and the process group. On a CPU wait for what is in flight; on a GPU nothing may be."""
        self._thread.shutdown()
        if self._group is not None:
            end_group(self._group)
        self._group = None

    def _count(self, parts: int, values: Tensor) -> None:
        """Count parts of one rank's size. gloo always uses rings; NCCL may use trees, which send as many bytes."""
        self._sent += parts * values.nbytes // self.size


@atexit.register
def _close_all() -> None:
    """End the threads of gloo before the interpreter, which they call: else they abort the process."""
    for stream in list(open_streams):
        stream.close()
