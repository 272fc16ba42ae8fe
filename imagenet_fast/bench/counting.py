"""What a step of an engine costs a rank at a scale that nobody here has, counted without a network.

On torch's fake process group, which has as many ranks as one likes and whose operations are done at once, and on the
meta device, whose tensors have shapes and no values. The engine takes it for a GPU: nothing is issued by threads, and
messages travel in a GPU's pieces. A layer profile gives the gradients' shapes and the times that plans are made from;
nothing waits for them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mode
from typing import Any

import torch
import torch._dynamo  # as the meta device's first operation would, in every process
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from imagenet_fast.bench.network import parse_rate
from imagenet_fast.bench.processes import in_processes
from imagenet_fast.bench.replay import timing_of
from imagenet_fast.bench.whole_numbers import whole_numbers
from imagenet_fast.cost.link import Link
from imagenet_fast.cost.profile import Layer, Profile
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.engine_settings import Collective, SparseSync, Sync, Wire
from imagenet_fast.record.tables import compact_table, number
from imagenet_fast.sync import EngineSettings, GradientPool, SyncEngine, declare, wire_dtype
from imagenet_fast.sync.channel import Call, Channel
from imagenet_fast.sync.collectives import wire_for
from imagenet_fast.sync.engines.sparse import Sparse
from imagenet_fast.sync.messages import messages_of
from imagenet_fast.sync.prediction import predict_best
from imagenet_fast.sync.probing import Network
from imagenet_fast.sync.scheduler import Scheduler
from imagenet_fast.sync.topology import Topology

COUNTED = "lazy,dear,ring,hybrid,sparse"

Kernel = Callable[[], object]
"""A tensor operation, ready to be done."""

_META = torch.device("meta")
_WARM_STEPS, _STEPS = 4, 20  # by the first, layers' readers are known and `sparse` is past its ramp

# What a link is taken to carry of its line rate, the rest being protocol.
_PAYLOAD = 0.9
# Seconds, from the cost model that NCCL chooses its algorithms by (its src/graph/tuning.cc, protocol Simple): a call of
# the library, a hop over NVLink inside a node, a hop between nodes.
_CALL_S, _INSIDE_S, _BETWEEN_S = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True)
class Count:
    """A step of one engine, as its busiest rank of the first two nodes goes through it."""

    engine: str
    wire: Wire
    collective: Collective
    """By which most bytes go."""
    model: str
    ranks: int
    ranks_per_node: int
    calls: int
    """Of the backend; sends and receives that are handed over together are one."""
    messages: int
    """From this rank to another; a vector operation sends one to each."""
    smallest_message: int | None
    """Bytes; None where there are no messages."""
    kernels: int
    """Operations that compute or copy, not those that view or allocate, nor the backend's."""
    host_ms: float
    """Processor time of a step: hooks, launches and waits; without autograd, the optimiser's work and what the
    backend's calls take by themselves. The least of 20, since what else the machine does only adds to it."""
    meta_ms: float
    """The part of it that the kernels take by themselves on the meta device, where a GPU's launches would be."""
    nic_bytes: int
    """Out of the busier of the first two nodes."""
    least_nic_bytes: float
    """2 (H-1)/H times the wire bytes of the gradients that this step averages over H nodes, and of what else must be
    averaged for it."""


def bench_count(profile: Profile, engines: Sequence[Sync], ranks: str, ranks_per_node: int, link: str) -> list[Count]:
    """Count a step of every engine on each number of ``ranks``, a list such as 8,64, in nodes that are linked at
    ``link``. Raises UserError."""
    sizes, bits_per_s = parse_ranks(ranks, ranks_per_node), parse_rate(link)
    counted = [_countable(settings) for settings in engines]
    rows: list[Count] = []
    for settings in counted:  # each in a process of its own, with no other's groups
        rows += in_processes(
            1, "imagenet_fast.bench.counting", _counts, profile, settings, sizes, ranks_per_node, bits_per_s
        )[0]
    return rows


def parse_ranks(text: str, ranks_per_node: int) -> list[int]:
    """The numbers of a list such as 8,64,512. Raises UserError where one is no number of full nodes."""
    sizes = whole_numbers("--ranks", text, "8,64,512")
    for ranks in sizes:
        if ranks % ranks_per_node:
            raise UserError(
                f"--ranks {ranks} is no whole number of nodes of --ranks-per-node {ranks_per_node}; change one"
            )
    return sizes


def stated_link(nodes: int, ranks_per_node: int, bits_per_s: float) -> Link:
    """What an all-reduce by levels is taken to cost, n bytes on each of ``ranks_per_node`` ranks of each node.

    The ranks of a node share its link, through which 2 (H-1)/H n bytes pass; what they send each other takes no time.
    Latency is that of a tree over the nodes. Of a single node only the latency is left.
    """
    hops_s = (ranks_per_node - 1) * _INSIDE_S + math.ceil(math.log2(nodes)) * _BETWEEN_S
    return Link(_CALL_S + 2 * hops_s, 2 * (nodes - 1) / nodes * 8 / (_PAYLOAD * bits_per_s), _CALL_S)


def count_table(counts: list[Count]) -> Table:
    """One row an engine and a number of ranks; ``sent`` and ``min B`` are of messages, ``ops`` kernels."""
    main = mode(count.wire for count in counts)
    table = compact_table(
        ("engine", "by"),
        ("ranks", "calls", "sent", "min B", "ops", "ms", "NIC MB", "x min"),
        (
            (
                c.engine if c.wire == main else f"{c.engine} {c.wire}", c.collective, str(c.ranks), str(c.calls),
                str(c.messages), number(c.smallest_message, "d"), str(c.kernels), f"{c.host_ms:.2f}",
                f"{c.nic_bytes / 1e6:.1f}", f"{c.nic_bytes / c.least_nic_bytes:.3f}" if c.least_nic_bytes else "–",
            )
            for c in counts
        ),
    )  # fmt: skip
    node = f"{counts[0].ranks_per_node} rank{'s' if counts[0].ranks_per_node > 1 else ''}"
    table.title = f"{counts[0].model}, nodes of {node}, {main}: counted, without a network"
    return table


def _countable(settings: Sync) -> EngineSettings:
    if not settings.ours:
        raise UserError(f"--sync {settings.kind} is torch's and its calls can't be counted; leave it out with --count")
    if settings.chooses:
        raise UserError(f"--sync {settings.kind} becomes one of the other engines; with --count name those instead")
    return settings  # type: ignore[return-value]  # all others are


def _counts(
    number: int, profile: Profile, settings: EngineSettings, sizes: Sequence[int], ranks_per_node: int, bits_per_s: int
) -> list[Count]:
    return [_count(profile, settings, ranks, ranks_per_node, bits_per_s) for ranks in sizes]


def _count(profile: Profile, settings: EngineSettings, ranks: int, ranks_per_node: int, bits_per_s: int) -> Count:
    nodes = ranks // ranks_per_node
    link = stated_link(nodes, ranks_per_node, bits_per_s)
    # Two nodes tell of all: a parameter server sits on the first, and of nodes beyond a power of two the second bears
    # a butterfly's burden.
    by_rank: list[list[Call]] = []
    for rank in range(min(nodes, 2) * ranks_per_node):
        with _fake_ranks(rank, ranks):
            by_rank.append(_Step(profile, settings, ranks_per_node, link).noted())
    busiest = max(range(len(by_rank)), key=lambda rank: (len(by_rank[rank]), _messages(by_rank[rank])))
    calls = by_rank[busiest]
    with _fake_ranks(busiest, ranks):
        step = _Step(profile, settings, ranks_per_node, link, noting=False)
        kernels = step.kernels()
        host_s, meta_s = step.host_s(calls, kernels)
        return Count(
            settings.kind, settings.wire, step.collective, profile.model, ranks, ranks_per_node,
            len(calls), _messages(calls), min((size for call in calls for _, _, size in call.sent), default=None),
            len(kernels), 1e3 * host_s, 1e3 * meta_s, max(_nic_bytes(by_rank, ranks_per_node)),
            2 * (nodes - 1) / nodes * step.averaged_bytes if nodes > 1 else 0.0,
        )  # fmt: skip


@contextmanager
def _fake_ranks(rank: int, size: int) -> Iterator[None]:
    """As ``rank`` of ``size``, of which there are no others. Its operations are done at once, and do nothing."""
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Step:
    """A step of one engine over layers of a profile's shapes. Gradients come to the hooks without autograd, in the
    pool's order."""

    def __init__(
        self, profile: Profile, settings: EngineSettings, ranks_per_node: int, link: Link, noting: bool = True
    ) -> None:
        self._model = nn.Sequential(*(_Layer(layer) for layer in profile.layers))
        self._alone = nn.Sequential(*(_Layer(layer) for layer in profile.layers))  # without a pool
        self._gradients = {p: torch.empty_like(p) for p in [*self._model.parameters(), *self._alone.parameters()]}
        self._x = torch.zeros(1)
        self._calls: list[Call] = []
        self._pool = pool = GradientPool(self._model, ranks_per_node=ranks_per_node)
        pool.topology = _Noting(ranks_per_node, self._calls if noting else None)
        pool.order([span.name for span in pool.spans])  # as it is: ranks without values can't agree on another
        self._travelling = settings.travelling
        wire = wire_dtype(settings.wire)
        self._wire = wire_for(pool.buffer.dtype, wire, pool.topology)
        declaration = declare(settings)  # type: ignore[arg-type]  # none that chooses
        network = Network(pool.topology, self._wire, link)
        timing = timing_of(profile, self._model, pool.spans)
        self._engine: SyncEngine
        if isinstance(settings, SparseSync):
            self._engine = Spread(settings, pool, wire)
        else:
            self._engine = Scheduler(declaration, pool, network, timing)
        fuse, _ = predict_best(declaration, pool, self._wire, timing, network)
        size: Counter[Collective] = Counter()
        for message in messages_of(declaration, pool, self._wire, fuse, network):
            size[message.collective] += message.part.stop - message.part.start
        self.collective = max(size, key=size.__getitem__)
        """By which most of the values go."""
        pool.attach(self._engine)
        for _ in range(_WARM_STEPS):
            self._run()

    def noted(self) -> list[Call]:
        """The calls of one step."""
        self._calls.clear()
        self._run()
        return list(self._calls)

    def kernels(self) -> list[Kernel]:
        """The tensor operations of one step, to be done again."""
        kernels = _Kernels()
        with kernels:
            self._run()
        return kernels.seen

    def host_s(self, calls: Sequence[Call], kernels: Sequence[Kernel]) -> tuple[float, float]:
        """Processor seconds of a step without those of its ``calls`` of the backend by themselves; and the part of it
        that its ``kernels`` take by themselves."""
        again = [_repeat(call) for call in calls]
        rows = []
        for _ in range(_STEPS):
            calling = _seconds(lambda: [call() for call in again])
            standing_in = _seconds(lambda: [kernel() for kernel in kernels])
            rows.append((_seconds(self._run), _seconds(self._run_alone), calling, standing_in))
        running_s, alone_s, calling_s, meta_s = (min(column) for column in zip(*rows, strict=True))
        return running_s - alone_s - calling_s, meta_s

    @property
    def averaged_bytes(self) -> int:
        """On the wire, of what the last step has averaged: elements of parameters, without padding, and norms."""
        elements, wire = self._engine.elements(), self._wire.itemsize
        if elements is None:
            sent = round(sum(self._travelling(p.shape) for p in self._model.parameters()))
        else:
            sent = sum(part.stop - part.start for parts in elements.values() for part in parts)
        return wire * sent + (self._engine.norms_bytes if isinstance(self._engine, Spread) else 0)

    def _run(self) -> None:
        self._pool.zero_grad()
        self._model(self._x)
        for span in self._pool.spans:
            span.param.grad = self._gradients[span.param]
            self._pool._collect(span.param)
        self._pool.finish()
        self._pool.update(lambda *_: None)

    def _run_alone(self) -> None:
        """What of it is not synchronisation."""
        self._alone(self._x)
        for param in self._alone.parameters():
            param.grad = self._gradients[param]


class _Layer(nn.Module):
    """Parameters of a layer's shapes, and nothing to do."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for place, shape in enumerate(layer.shapes):
            self.register_parameter(f"param{place}", nn.Parameter(torch.empty(shape, device=_META)))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Spread(Sparse):
    """``sparse`` beyond its ramp where chunks' norms have no values.

    What is sent lies spread over the pool, as in life; chunks side by side would need no packing.
    """

    def __init__(self, settings: SparseSync, pool: GradientPool, wire: torch.dtype) -> None:
        # The first step, dense, needs no ids.
        past = settings.model_copy(update={"dense_epochs": 1.0, "ramp_epochs": 0.0})
        super().__init__(past, pool, wire, steps_per_epoch=1)

    @property
    def norms_bytes(self) -> int:
        return 4 * len(self._chunks)

    def _choose(self) -> None:
        """As on values, but for what comes to the host: every eighth, say, instead of the largest."""
        chunks = len(self._chunks)
        self._here = torch.empty(chunks, dtype=torch.int64, device=_META)
        super()._choose()
        count = len(self._ids)
        self._here = torch.arange(count) * chunks // count


class _Noting(Topology):
    """All ranks, whose channels note their calls in ``calls``."""

    def __init__(self, ranks_per_node: int, calls: list[Call] | None) -> None:
        super().__init__(_META, ranks_per_node=ranks_per_node)
        self._noted = calls

    def channel(self, ranks: tuple[int, ...], role: str) -> Channel:
        channel = super().channel(ranks, role)
        channel.calls = self._noted
        return channel


class _Kernels(TorchDispatchMode):
    """Keeps the operations on the meta device that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.seen: list[Kernel] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        again = partial(func, *args, **(kwargs or {}))
        result = again()
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            leaves = tree_leaves((args, kwargs, result))
            if any(isinstance(leaf, Tensor) and leaf.device == _META for leaf in leaves):
                self.seen.append(again)
        return result


def _messages(calls: Sequence[Call]) -> int:
    return sum(count for call in calls for _, count, _ in call.sent)


def _nic_bytes(by_rank: Sequence[Sequence[Call]], ranks_per_node: int) -> list[int]:
    """What leaves each node, given the calls of all its ranks."""
    leaving = [0] * (len(by_rank) // ranks_per_node)
    for rank, calls in enumerate(by_rank):
        node = rank // ranks_per_node
        for call in calls:
            leaving[node] += sum(count * size for to, count, size in call.sent if to // ranks_per_node != node)
    return leaving


def _repeat(call: Call) -> Callable[[], object]:
    """The same call of the backend, by itself."""
    group = dist.new_group(list(call.ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    ranks = len(call.ranks)
    own = call.ranks.index(dist.get_rank())

    def bytes_(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=_META)

    match call.operation:
        case "all_to_all":
            sizes = {to: size for to, _, size in call.sent}
            parts = [sizes.get(rank, 0) for rank in call.ranks]
            even = len(sizes) == ranks - 1 and len(set(sizes.values())) == 1
            parts[own] = parts[own - 1] if even else 0
            leaving, arriving = bytes_(sum(parts)), bytes_(sum(parts))
            cuts = None if even else parts
            return lambda: dist.all_to_all_single(arriving, leaving, cuts, cuts, group, async_op=True)
        case "exchange":
            leaves = [(to, bytes_(size)) for to, _, size in call.sent]
            arrives = leaves or [(call.ranks[own - 1], bytes_(1))]

            def exchange() -> None:
                operations = [dist.P2POp(dist.irecv, t, peer, group) for peer, t in arrives]
                operations += [dist.P2POp(dist.isend, t, peer, group) for peer, t in leaves]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()

            return exchange
        case operation:
            ((_, _, size),) = call.sent
            whole = bytes_(size * ranks)
            part = whole.view(ranks, -1)[own]
            match operation:
                case "all_gather":
                    return lambda: dist.all_gather_into_tensor(whole, part, group, async_op=True)
                case "reduce_scatter":
                    return lambda: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group, async_op=True)
                case _:
                    return lambda: dist.all_reduce(whole, group=group, async_op=True)


def _seconds(act: Callable[[], object]) -> float:
    """Of this thread on the processor, whatever else the machine does."""
    begun = time.thread_time()
    act()
    return time.thread_time() - begun
