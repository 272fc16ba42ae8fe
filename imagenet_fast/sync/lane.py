"""Transfers under way: who carries them on a CPU and on a GPU, and what it is to wait for one."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.ranks.roll_call import PeerLost
from imagenet_fast.sync.marks import Mark, mark

Messages = Iterable[tuple[int, Tensor]]
"""Whom a message goes to or comes from, and its values, contiguous."""

_WORKERS = 4  # transfers of one lane under way at once on a CPU: enough that one waits while another adds
_lanes = itertools.count()


@dataclass
class Traffic:
    """What a part of a transfer cost this rank: bytes on the wire, and from when to when it was under way."""

    sent_bytes: int = 0
    received_bytes: int = 0
    begun: Mark | None = None
    ended: Mark | None = None


@dataclass(frozen=True)
class Transfer:
    """A collective under way: after ``wait`` its tensor holds the same values on every rank.

    On a GPU ``wait`` makes the current stream wait, not the host.
    """

    wait: Callable[[], None]
    traffic: Sequence[Traffic] = ()
    """Of each of its parts."""


@dataclass(frozen=True)
class Peers:
    """The ranks that take part in a transfer, seen by one of them, which is number ``rank`` of ``size``."""

    ranks: Sequence[int]
    group: dist.ProcessGroup | None
    tag: int
    traffic: Traffic

    @property
    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def among(self, members: Sequence[int]) -> Peers:
        """Some of these peers, by their numbers here; this rank must be one of them."""
        return Peers([self.ranks[member] for member in members], self.group, self.tag, self.traffic)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send and receive at once, and wait for all of it. Empty messages are left out on both sides."""
        operations = []
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, tensor in messages:
                if tensor.numel():
                    operations.append(dist.P2POp(operation, tensor, self.ranks[peer], self.group, self.tag))
                    if operation is dist.isend:
                        self.traffic.sent_bytes += tensor.nbytes
                    else:
                        self.traffic.received_bytes += tensor.nbytes
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(operations[min(number, len(operations) - 1)].peer, error) from error


class Lane:
    """Transfers made of point-to-point messages, started in the same order on every rank.

    On a CPU a wait blocks its thread, so a few threads carry a transfer each, the oldest first: while one waits for
    the wire another adds. Since every rank begins them in one order, the oldest is under way everywhere, and so
    no two ranks can wait for each other. On a GPU nothing blocks: the caller queues the whole transfer on a
    stream of this lane's.

    A lane with ``own`` connections (a process group of its own) does not queue behind the messages of others.
    """

    def __init__(self, device: torch.device, own: bool = False, node: int | None = None) -> None:
        self.node = node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """Neighbouring ranks that share a machine; torchrun's number unless given."""
        self.group = _new_group() if own else None
        self.ranks = range(dist.get_world_size())
        self.segment_bytes = max(2**19, 2**16 * len(self.ranks)) * (8 if device.type == "cuda" else 1)
        """A long message travels in pieces of this size, so that one is added up while the next is under way; every
        rank's share of a piece still outweighs a message's latency."""
        self._tags = itertools.count((next(_lanes) % 2**11) << 20)
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if own else 0) if device.type == "cuda" else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = True

    def start(self, carry: Callable[[Peers], None]) -> Transfer:
        """Begin a transfer: ``carry`` exchanges messages with the peers it is given until all is done."""
        traffic = Traffic()
        peers = Peers(self.ranks, self.group, next(self._tags), traffic)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                traffic.begun = mark(self._device)
                carry(peers)
                done = traffic.ended = mark(self._device)
                assert isinstance(done, torch.cuda.Event)
            return Transfer(lambda: torch.cuda.current_stream().wait_event(done), [traffic])

        outcome: Future[None] = Future()

        def task() -> None:
            traffic.begun = mark(self._device)
            try:
                carry(peers)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                traffic.ended = mark(self._device)
                outcome.set_result(None)

        if self._idle:
            self._idle = False
            for _ in range(_WORKERS):
                threading.Thread(target=_work, args=(self._queue,), daemon=True).start()
            weakref.finalize(self, _dismiss, self._queue)
        self._queue.put(task)
        return Transfer(outcome.result, [traffic])


def together(transfers: Sequence[Transfer]) -> Transfer:
    """Several transfers as one."""

    def wait() -> None:
        for transfer in transfers:
            transfer.wait()

    return Transfer(wait, [traffic for transfer in transfers for traffic in transfer.traffic])


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := queue.get()) is not None:
        task()
        del task


def _dismiss(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(_WORKERS):
        queue.put(None)
