"""A channel: one process group, one order, and who issues its calls on a CPU and on a GPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from imagenet_fast.distributed.failure_detection import PeerLost
from imagenet_fast.distributed.process_groups import new_group
from imagenet_fast.sync.device_timer import Timestamp, record_timestamp

# Renamed in torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class CommStats:
    """What a phase cost this rank: bytes on the wire, and from when to when it was under way."""

    sent_bytes: int = 0
    received_bytes: int = 0
    begun: Timestamp | None = None
    ended: Timestamp | None = None


@dataclass(frozen=True)
class Call:
    """One call of the backend: which operation, over which ranks, and the bytes this rank sends to each of them."""

    operation: str
    ranks: tuple[int, ...]
    sent: tuple[tuple[int, int, int], ...]
    """Messages: to whom, how many, of how many bytes each."""


@dataclass(frozen=True)
class PendingOp:
    """A phase that has entered its channel. On a GPU ``wait`` makes the current stream wait, not the host."""

    wait: Callable[[], None]


class CommStream:
    """Carries phases over ``ranks``, of which this process is one, in the order in which they are entered.

    Every rank must enter its phases in the same order. On a CPU a thread of the channel's issues them: it waits until a
    phase's predecessor is done, does the phase's local work and starts its collective, but does not wait for that
    one, so that the wire is busy while the next is prepared. On a GPU nothing blocks, and the caller queues all of it
    on the channel's stream. Without ranks it is for local work.

    Its operations (:meth:`all_to_all` and so on) are for phases only. They return what is to be waited for, and count
    bytes: by arithmetic, for backends do not tell.
    """

    def __init__(self, device: torch.device, ranks: tuple[int, ...] = (), max_ctas: int | None = None) -> None:
        self.ranks = ranks
        self.size = max(1, len(ranks))
        self.place = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        """This rank's number among them."""
        self.calls: list[Call] | None = None
        """Where every call is noted, if anybody wants to know."""
        self._device = device
        self._group = new_group(device, ranks, True, max_ctas) if len(ranks) > 1 else None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = True
        self._traffic = CommStats()

    def enter(self, start: Callable[[], Work | None], after: Sequence[PendingOp], traffic: CommStats) -> PendingOp:
        """Begin a phase once all of ``after`` are done and all that has entered before has begun.

        ``start`` does its local work and starts its collective; None: there is none, or it is done."""
        if self._device.type == "cpu":
            return self._hand_over(start, after, traffic)
        if self._stream is None:  # the meta device: for counting
            self._traffic = traffic
            start()
            return PendingOp(_nothing)
        if not after:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for entry in after:
                entry.wait()
            self._traffic = traffic
            traffic.begun = record_timestamp(self._device)
            work = start()
            if work is not None:
                work.wait()
            done = traffic.ended = record_timestamp(self._device)
            assert isinstance(done, torch.cuda.Event)
        return PendingOp(lambda: torch.cuda.current_stream().wait_event(done))

    def all_to_all(
        self, arrived: Tensor, values: Tensor, arriving: Sequence[int] = (), leaving: Sequence[int] = ()
    ) -> Work | None:
        """Part r of ``values`` to rank r, the parts of all ranks into ``arrived``; even ones unless sizes are given."""
        itemsize = values.element_size()
        if leaving:
            sizes = [size for place, size in enumerate(leaving) if place != self.place and size]
            landing = [size for place, size in enumerate(arriving) if place != self.place and size]
            self._count(itemsize * sum(sizes), itemsize * sum(landing))
        else:
            share = values.nbytes // self.size
            self._count(share * (self.size - 1), share * (self.size - 1))
        if self.calls is not None:
            parts = leaving or [values.numel() // self.size] * self.size
            others = [(r, 1, itemsize * n) for r, n in zip(self.ranks, parts, strict=True) if r != self._rank and n]
            self.calls.append(Call("all_to_all", self.ranks, tuple(others)))
        return dist.all_to_all_single(
            arrived, values, list(arriving) or None, list(leaving) or None, group=self._group, async_op=True
        )

    def all_gather(self, values: Tensor, direct: bool = False) -> Work | None:
        """This rank's part of ``values`` to all ranks, and theirs to here, in place.

        gloo hands parts on from neighbour to neighbour. ``direct``: there each rank sends its part to all others
        itself, in one step instead of P-1, at the cost of a copy: with nothing else on the wire that keeps it busier.
        """
        own = values.view(self.size, -1)[self.place]
        if direct and self._device.type == "cpu":
            return self.all_to_all(values, own.repeat(self.size))
        self._count_ring("all_gather", self.size - 1, values)
        work: Work | None = all_gather_single(values, own, self._group, async_op=True)
        return work

    def reduce_scatter(self, values: Tensor) -> Work | None:
        """The mean over the ranks of this rank's part of ``values``, in place, added by the backend in their dtype."""
        self._count_ring("reduce_scatter", self.size - 1, values)
        own = values.view(self.size, -1)[self.place]
        work: Work | None = _reduce_scatter(own, values, dist.ReduceOp.AVG, self._group, async_op=True)
        return work

    def all_reduce(self, values: Tensor, mean: bool = False) -> Work | None:
        """The sum over the ranks, or with NCCL the mean, in place, added by the backend in the dtype of ``values``."""
        self._count_ring("all_reduce", 2 * (self.size - 1), values)
        operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return dist.all_reduce(values, operation, self._group, async_op=True)

    def exchange(self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive messages to and from ranks, by their number here, and wait for all of them.

        Raises PeerLost.
        """
        operations = [dist.P2POp(dist.irecv, t, group=self._group, group_peer=peer) for peer, t in arriving]
        operations += [dist.P2POp(dist.isend, t, group=self._group, group_peer=peer) for peer, t in leaving]
        self._count(sum(t.nbytes for _, t in leaving), sum(t.nbytes for _, t in arriving))
        if self.calls is not None:
            sent = tuple((self.ranks[peer], 1, t.nbytes) for peer, t in leaving)
            self.calls.append(Call("exchange", self.ranks, sent))
        for number, work in enumerate(dist.batch_isend_irecv(operations)):
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(operations[min(number, len(operations) - 1)].peer, error) from error

    def close(self) -> None:
        """End its process group and thread. Nothing may be under way."""
        self._queue.put(None)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @property
    def _rank(self) -> int:
        return self.ranks[self.place]

    def _count(self, sent: int, received: int) -> None:
        self._traffic.sent_bytes += sent
        self._traffic.received_bytes += received

    def _count_ring(self, operation: str, hops: int, values: Tensor) -> None:
        """Backends send these round a ring (gloo's always are; NCCL's may be trees, with as many bytes)."""
        sent = hops * values.nbytes // self.size
        self._count(sent, sent)
        if self.calls is not None:
            after = self.ranks[(self.place + 1) % self.size]
            self.calls.append(Call(operation, self.ranks, ((after, hops, values.nbytes // self.size),)))

    def _hand_over(self, start: Callable[[], Work | None], after: Sequence[PendingOp], traffic: CommStats) -> PendingOp:
        begun: Future[Work | None] = Future()

        def task() -> None:
            try:
                for entry in after:
                    entry.wait()
                self._traffic = traffic
                traffic.begun = record_timestamp(self._device)
                work = start()
            except BaseException as error:
                begun.set_exception(error)
                return
            if work is None:
                traffic.ended = record_timestamp(self._device)
            else:
                work.get_future().then(lambda _: _end(traffic, self._device))
            begun.set_result(work)

        def wait() -> None:
            work = begun.result()
            if work is not None:
                work.wait()

        if self._idle:
            self._idle = False
            threading.Thread(target=_issue, args=(self._queue, torch.get_num_threads()), daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(task)
        return PendingOp(wait)


def _issue(queue: SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    torch.set_num_threads(threads)  # a thread's first product would take all cores, and may be rounded another way
    while (task := queue.get()) is not None:
        task()
        del task


def _end(traffic: CommStats, device: torch.device) -> None:
    traffic.ended = record_timestamp(device)


def _nothing() -> None:
    """Done at once."""
