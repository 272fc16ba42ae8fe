"""The topology: which ranks share a node, and the streams between ranks."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha1
from typing import ClassVar

import torch
import torch.distributed as dist

from imagenet_fast.cost_model.collectives import RankLayout, row_of
from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.sync.comm_stream import CommStream


class Topology:
    """The ranks of a process group, by node, and the streams between them.

    A node is ``ranks_per_node`` neighbouring ranks if that is given. Otherwise it is torchrun's ``GROUP_RANK``, or the
    host name, which the ranks exchange. So every rank of the group must create the same topologies in the same order.

    Pools of which only one works at a time can share a topology, and with it its streams: each gloo process group has a
    thread that wakes a hundred times a second, and the groups of many idle pools would disturb the one that works.
    """

    _made: ClassVar[int] = 0
    """The number of the next process group."""
    _dropped: ClassVar[list[CommStream]] = []
    """Streams that are no longer used, kept so that none is ended alone: see ``drop``."""
    _in_use: ClassVar[list[tuple[list[torch.cuda.Event], object]]] = []
    """For each call of ``drop`` on a GPU: events after the last operations, and what holds the memory of these."""

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, ranks_per_node: int | None = None
    ) -> None:
        """Find the node of every rank.

        Args:
            device: Device of the values to be sent.
            group: Process group; None: all ranks, or a single rank without torch.distributed.
            ranks_per_node: Ranks per node; None: found from the environment.

        Raises:
            ValueError: The ranks are no whole number of nodes of ``ranks_per_node``.
        """
        self.device = device
        self.group = group
        self.alone = alone = group is None and not dist.is_initialized()
        """True if there was no process group when the topology was made."""
        ranks = [0] if alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self.ranks = tuple(sorted(ranks))  # as torch numbers the ranks of the groups that streams make
        self.rank = 0 if alone else dist.get_rank()
        self.size = len(self.ranks)
        if ranks_per_node is not None and self.size % ranks_per_node:
            raise ValueError(f"{self.size} ranks are no whole number of nodes of {ranks_per_node}; give another number")
        self.nodes = _nodes(ranks, group, ranks_per_node, device)
        """The ranks of each node; nodes are in the order of their first rank."""
        self.max_ctas: int | None = None
        """Thread blocks that NCCL may use for an operation of a stream made from now on; None: as many as it likes."""
        self._streams: dict[tuple[tuple[int, ...], str], CommStream] = {}

    @property
    def layout(self) -> RankLayout:
        """The number of ranks on each node, for the cost model."""
        return RankLayout(tuple(map(len, self.nodes)), on_gpu=self.device.type != "cpu")

    def grid(self, collective: Collective) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks of this rank's row and column in the grid on which a collective works.

        A row is a node, or a single rank. A column joins the same place of all rows.

        Raises:
            ValueError: The collective has a row per node, and nodes have different numbers of ranks.
        """
        nodes = self.layout.nodes
        if collective == "hierarchical" and len(set(nodes)) > 1:
            raise ValueError(
                f"nodes of {', '.join(map(str, nodes))} ranks have no equal places; start equally many ranks on each "
                "node, or choose a collective without levels, such as pairwise"
            )
        width = row_of(collective, self.layout)
        ranks = [rank for node in self.nodes for rank in node]
        row, place = divmod(ranks.index(self.rank), width)
        return tuple(ranks[row * width : (row + 1) * width]), tuple(sorted(ranks[place::width]))

    def padded(self, elements: int) -> int:
        """Return the length of a message that holds ``elements`` and can be cut evenly on every level."""
        return -(-elements // self.size) * self.size

    def of_first_rank(self, numbers: Sequence[float]) -> list[float]:
        """Return the first rank's ``numbers`` on every rank. Every rank must call it."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.broadcast(told, self.ranks[0], self.group)
        return list(told.tolist())

    def anew(self) -> Topology:
        """Return the same ranks and nodes, with streams of its own."""
        twin = copy.copy(self)
        twin._streams = {}
        return twin

    def stream(self, ranks: tuple[int, ...], role: str) -> CommStream:
        """Return the stream of ``ranks`` for one kind of op.

        The stream is made at the first call, which every rank must make in the same order.

        Args:
            ranks: The ranks that it connects; empty for local work.
            role: Kind of op, such as ``scatter`` or ``gather``.
        """
        key = (ranks, role)
        if key not in self._streams:
            with self._counted_apart() if len(ranks) > 1 else nullcontext():
                self._streams[key] = self._new_stream(ranks)
        return self._streams[key]

    def _new_stream(self, ranks: tuple[int, ...]) -> CommStream:
        return CommStream(self.device, ranks, self.max_ctas)

    def close(self) -> None:
        """End the process groups and threads. Nothing may be in flight."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def drop(self, user: object) -> None:
        """Stop using the streams, on which an operation may be in flight that never ends.

        Their process groups end with all others. None is ended alone, because that would wait too.

        Args:
            user: What holds the memory that these operations use. On a GPU it is kept until they have ended, as the
                allocator would give the memory to the next tensor.
        """
        Topology._in_use[:] = [(ends, kept) for ends, kept in Topology._in_use if not all(end.query() for end in ends)]
        if ends := [end for stream in self._streams.values() if (end := stream.record()) is not None]:
            Topology._in_use.append((ends, user))
        Topology._dropped.extend(self._streams.values())
        self._streams.clear()

    @contextmanager
    def _counted_apart(self) -> Iterator[None]:
        """Name the process groups made inside by their ranks and by a counter of our own.

        torch takes a counter of its process: of the groups made in it, or in older versions of those it is in. The name
        must be the same on all ranks, but some ranks make more groups than others.
        """
        device = self.device if self.device.type == "cuda" else torch.device("cpu")  # a count's is "meta"
        number = torch.tensor(Topology._made, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        Topology._made = int(number) + 1
        salt, torchs, counters = str(int(number)), vars(dist.distributed_c10d), dist.distributed_c10d._world
        name, others = torchs["_hash_ranks_to_str"], counters.group_count
        torchs["_hash_ranks_to_str"] = lambda ranks: sha1(f"{ranks} {salt}".encode(), usedforsecurity=False).hexdigest()
        try:
            yield
        finally:
            torchs["_hash_ranks_to_str"], counters.group_count = name, others


def _nodes(
    ranks: list[int], group: dist.ProcessGroup | None, ranks_per_node: int | None, device: torch.device
) -> tuple[tuple[int, ...], ...]:
    """Return the rising ranks of each node, given the ranks of ``group`` in its order, which may be another."""
    if ranks_per_node is not None:
        rising = sorted(ranks)
        return tuple(tuple(rising[begin : begin + ranks_per_node]) for begin in range(0, len(rising), ranks_per_node))
    if len(ranks) == 1:
        return (tuple(ranks),)
    own = os.environ.get("GROUP_RANK", socket.gethostname())
    labels: list[str] = [""] * len(ranks)
    with torch.cuda.device(device if device.type == "cuda" else -1):  # NCCL sends objects by the current device
        dist.all_gather_object(labels, own, group=group)
    node_of = dict(sorted(zip(ranks, labels, strict=True)))
    return tuple(
        tuple(rank for rank, other in node_of.items() if other == label) for label in dict.fromkeys(node_of.values())
    )
