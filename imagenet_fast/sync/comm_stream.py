"""A communication stream: one process group whose operations run in one order, on a thread or on a CUDA stream.

A phase is a ``CommOp``: local work, then at most one collective operation.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp
from imagenet_fast.distributed.groups import end_group, leave_at_exit, new_group
from imagenet_fast.distributed.watchdog import PeerLost

# Renamed in torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Wait = Callable[[], None]
"""Waits for a phase that has been entered. On a GPU the current stream waits, not the host."""

open_streams: WeakSet[CommStream] = WeakSet()
"""Streams with threads of gloo."""


@dataclass
class CommStats:
    """The cost of a phase on this rank: its bytes on the wire, and when it began and ended."""

    sent_bytes: int = 0
    received_bytes: int = 0
    begun: Timestamp | None = None
    ended: Timestamp | None = None


class CommStream:
    """A queue of phases over some ranks, which run in the order in which they are entered.

    Every rank must enter its phases in the same order.

    On a CPU a thread of the CommStream issues the phases. It waits until a phase's predecessors are done, does the
    phase's local work and starts its collective. It does not wait for that collective, so that the wire is busy while
    the next phase is prepared. On a GPU nothing blocks: the caller queues everything on a CUDA stream of the
    CommStream.

    The operations (``all_to_all`` and so on) may be called by phases only. They return the work to wait for, and count
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
        self._traffic = CommStats()

    def enter(self, start: Callable[[], Work | None], after: Sequence[Wait], traffic: CommStats) -> Wait:
        """Enter a phase. It begins once all of ``after`` are done and all phases entered before have begun.

        Args:
            start: Does the local work and starts the collective. Returns the collective's work, or None where there is
                no collective or it is done.
            after: The phases to wait for.
            traffic: Where the phase's bytes and times are counted.
        """
        if self._stream is None:
            return self._hand_over(start, after, traffic)
        if not after:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for wait_before in after:
                wait_before()
            self._traffic = traffic
            traffic.begun = record_timestamp(self._device)
            work = start()
            if work is not None:
                work.wait()
            done = traffic.ended = record_timestamp(self._device)
            assert isinstance(done, torch.cuda.Event)
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

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
        itemsize = values.element_size()
        if leaving:
            sizes = [size for place, size in enumerate(leaving) if place != self.place and size]
            landing = [size for place, size in enumerate(arriving) if place != self.place and size]
            self._count(itemsize * sum(sizes), itemsize * sum(landing))
        else:
            share = values.nbytes // self.size
            self._count(share * (self.size - 1), share * (self.size - 1))
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
        self._count_ring(self.size - 1, values)
        work: Work | None = all_gather_single(values, own, self._group, async_op=True)
        return work

    def reduce_scatter(self, values: Tensor) -> Work | None:
        """Average this rank's part of ``values`` over the ranks, in place. The backend adds in the tensor's dtype."""
        self._count_ring(self.size - 1, values)
        own = values.view(self.size, -1)[self.place]
        work: Work | None = _reduce_scatter(own, values, dist.ReduceOp.AVG, self._group, async_op=True)
        return work

    def all_reduce(self, values: Tensor, mean: bool = False) -> Work | None:
        """Sum ``values`` over the ranks, in place. The backend adds in the tensor's dtype.

        Args:
            values: The tensor to sum.
            mean: Average instead, which only NCCL can.
        """
        self._count_ring(2 * (self.size - 1), values)
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
        self._count(sum(t.nbytes for _, t in leaving), sum(t.nbytes for _, t in arriving))
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

    def _count(self, sent: int, received: int) -> None:
        self._traffic.sent_bytes += sent
        self._traffic.received_bytes += received

    def _count_ring(self, hops: int, values: Tensor) -> None:
        """Count an operation as a ring. gloo always uses one; NCCL may use trees, which send as many bytes."""
        sent = hops * values.nbytes // self.size
        self._count(sent, sent)

    def _hand_over(self, start: Callable[[], Work | None], after: Sequence[Wait], traffic: CommStats) -> Wait:
        def issue() -> Work | None:
            for wait_before in after:
                wait_before()
            self._traffic = traffic
            traffic.begun = record_timestamp(self._device)
            work = start()
            if work is None:
                traffic.ended = record_timestamp(self._device)
            else:
                work.get_future().then(lambda _: setattr(traffic, "ended", record_timestamp(self._device)))
            return work

        def wait() -> None:
            work = begun.result()
            if work is not None:
                work.wait()

        begun = self._thread.submit(issue)
        return wait


@atexit.register
def _close_all() -> None:
    """End the threads of gloo before the interpreter, which they call: else they abort the process."""
    for stream in list(open_streams):
        stream.close()
